"""The structure of a token tree, without its tokens.

Node `i` of a tree has row `1 + i` in every table over its nodes; row 0 is the root, the text so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from offload_rt.system.device_copies import to_device

ROOT = -1
"""Parent of the nodes that directly follow the text."""


@dataclass(frozen=True)
class Tree:
    """A tree of nodes, each of which comes after its parent and its elder siblings.

    Attributes:
        parents: index of each node's parent, or `ROOT`.

    Raises:
        ValueError: a parent is neither `ROOT` nor an earlier node.
    """

    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents {list(self.parents)} must be {ROOT} or an earlier node")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else 1 + depths[parent])
        return depths

    @cached_property
    def ranks(self) -> list[list[int]]:
        """Nodes by sibling rank: all eldest children, then all second children, and so on."""
        ranks: list[list[int]] = []
        children: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            rank = children.get(parent, 0)
            children[parent] = rank + 1
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append(node)
        return ranks

    def path(self, row: int) -> list[int]:
        """Returns the nodes from a child of the root down to `row`."""
        path = []
        node = row - 1
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tries(self, path: Sequence[int], nodes: int | None = None) -> list[tuple[int, int]]:
        """Counts accepted and rejected nodes by sibling rank, given the accepted `path`.

        Args:
            nodes: count only so many nodes from the start; None: all.
        """
        reached = {ROOT, *path}
        tries: list[tuple[int, int]] = []
        for rank in Tree(self.parents[:nodes]).ranks:
            tried = [node for node in rank if self.parents[node] in reached]
            accepted = [node for node in tried if node in path]
            reached -= {self.parents[node] for node in accepted}  # younger siblings are not tried
            tries.append((len(accepted), len(tried) - len(accepted)))
        return tries

    def parent_rows(self, device: torch.device) -> Tensor:
        """Returns the row of each node's parent, `[nodes]`."""
        return on_device(tuple(parent + 1 for parent in self.parents), device)

    def descend(self, accepted: Tensor) -> Tensor:
        """Walks from the root to the first accepted child until there is none; returns the last row, 0-d.

        Args:
            accepted: `[nodes]` bool on the device; the host does not wait for it.
        """
        if self.is_chain:
            return accepted.long().cumprod(0).sum()
        device = accepted.device
        rows = torch.arange(1 + len(self), device=device)
        following = rows.clone()
        for rank in reversed(self.ranks):  # the eldest last, because it takes precedence
            nodes = on_device(tuple(rank), device)
            above = self.parent_rows(device)[nodes]
            following[above] = torch.where(accepted[nodes], nodes + 1, following[above])
        for _ in range(max(self.depths).bit_length()):  # pointer doubling: twice as many steps each time
            following = following[following]
        return following[0]


@lru_cache(maxsize=1024)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns indices on the device; those that recur from step to step are uploaded once."""
    with torch.inference_mode(False):
        return to_device(numbers, device)


def forest(sequences: Sequence[int]) -> Tree:
    """Returns a tree of chains of the given lengths, side by side below the root."""
    parents: list[int] = []
    for length in sequences:
        start = len(parents)
        parents += [ROOT if node == 0 else start + node - 1 for node in range(length)]
    return Tree(tuple(parents))
