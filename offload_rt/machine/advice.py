"""What keeps a machine from doing what it could, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.machine.doctor import Report
from offload_rt.machine.hardware import GIB, Gpu
from offload_rt.machine.inventory import Card
from offload_rt.machine.measuring import LinkFigures

LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, by generation, before the packets' own overhead."""

COPY_SHARE = 0.7  # of a link's nominal rate: pinned copies reach 0.8 to 0.85 where nothing is wrong
POWER_SHARE = 0.7  # of a card's default power limit: above it, work bound by memory loses little
LOAD_SHARE = 0.25  # of the processors: with more of them busy, every figure suffers
LOW_MEMORY_SHARE = 0.25  # of the memory: caches need more than that

KERNEL_REMEDIES = {
    "no compiler": "there is no C++ compiler: install g++",
    "switched off": "OFFLOAD_RT_NATIVE=0 switches it off: unset it",
    "build failed": "its build failed: install a g++ that knows C++17 and OpenMP, and see that the cache"
    " folder (OFFLOAD_RT_CACHE) can be written",
}


def without_kernel(why: str) -> str:
    """What a processor without the native kernel (`HostFacts.native_kernel`) means, with the remedy."""
    return f"attention on the processor is slower without the native kernel; {KERNEL_REMEDIES[why]}"


def warnings(report: Report) -> tuple[str, ...]:
    """What is wrong with the machine, a line each, with the remedy; nothing where all is well."""
    return (*_of_cards(report), *_of_host(report))


def _of_cards(report: Report) -> Iterator[str]:
    hardware = report.hardware
    for gpu, link, card in zip(hardware.gpus, report.links, report.cards, strict=False):
        yield from (f"GPU {card.device}: {warning}" for warning in _of_card(gpu, link, card))
    if report.cards and not hardware.gpus:
        names = ", ".join(card.name for card in report.cards)
        yield f"torch cannot use {names}: {report.no_cuda_device}"


def _of_card(gpu: Gpu, link: LinkFigures, card: Card) -> Iterator[str]:
    if not link.pinned:
        yield (
            "memory could not be page-locked, its copies run at a fraction of the link's rate; raise the"
            " limit (`ulimit -l unlimited`, in a container `--ulimit memlock=-1`)"
        )
    # As they are while copying: an idle card lowers its generation to save power.
    if link.width and card.link_width_most and link.width < card.link_width_most:
        yield (
            f"its link is ×{link.width} wide, the card can do ×{card.link_width_most}; put it into a slot"
            f" with {card.link_width_most} lanes from the processor, and see that no other card or disk"
            " takes half of them"
        )
    if link.generation and card.link_generation_most and link.generation < card.link_generation_most:
        yield (
            f"its link runs as PCIe {link.generation}, the card can do {card.link_generation_most}; set the"
            " slot's generation to the highest in the firmware (BIOS), and do without a riser cable"
        )
    nominal = (link.width or 0) * LANE_RATES.get(link.generation or 0, 0.0)
    rate = min(gpu.to_device_rate, gpu.to_host_rate)
    if link.pinned and rate < COPY_SHARE * nominal:
        yield (
            f"copies reach {rate:.1f} GB/s of the {nominal:.1f} that PCIe {link.generation} ×{link.width}"
            " has; end other programs that use the link or the memory, run on the processors next to the card"
            " (`numactl --cpunodebind`), and measure again with --refresh"
        )
    limit, default = card.power_limit_watts, card.power_default_watts
    if limit is not None and default is not None and limit < POWER_SHARE * default:
        yield (
            f"its power is limited to {limit:.0f} W of {default:.0f} W; raise it with"
            f" `nvidia-smi -i {card.bus or card.uuid} -pl {default:.0f}`"
        )


def _of_host(report: Report) -> Iterator[str]:
    host = report.host
    if report.load_average > max(1.0, LOAD_SHARE * host.cores_of_machine):
        yield (
            f"the load average was {report.load_average:.1f} on {host.cores_of_machine} processors, so that"
            " the figures are too low; measure again with --refresh when the machine is quiet"
        )
    # Drivers that choose the clock themselves call their normal state "powersave", and tell a preference.
    if host.governor == "powersave" and host.energy_preference in (None, "power", "balance_power"):
        told = "" if host.energy_preference is None else f" (preference: {host.energy_preference})"
        yield (
            f"the processor's clock saves power: governor powersave{told};"
            " `sudo cpupower frequency-set -g performance`"
        )
    if host.native_kernel != "built":
        yield without_kernel(host.native_kernel)
    limit, total, available = host.memory_limit_bytes, host.total_bytes, host.available_bytes
    if limit is not None and limit < total / 2:
        yield (
            f"the container may have {limit / GIB:.1f} of {total / GIB:.1f} GiB of memory; start it with more"
            " (docker: `--memory`)"
        )
    usable = min(total, limit or total)
    if available < LOW_MEMORY_SHARE * usable:
        yield (
            f"only {available / GIB:.1f} of {usable / GIB:.1f} GiB of memory are available; end programs that"
            " hold the rest"
        )
    if host.swap_used_bytes > GIB // 4:
        yield (
            f"{host.swap_used_bytes / GIB:.1f} GiB of memory were moved out to disk; end programs that are"
            " not needed, or read them back (`sudo swapoff -a && sudo swapon -a`)"
        )
    lockable = report.hardware.host.lockable_bytes
    if report.hardware.gpus and lockable < available / 2:
        yield (
            f"only {lockable / GIB:.2f} of {available / GIB:.1f} GiB of available memory may be page-locked;"
            " `ulimit -l unlimited`, for good `* - memlock unlimited` in /etc/security/limits.conf, in a"
            " container `--ulimit memlock=-1`"
        )
