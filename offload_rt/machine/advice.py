"""What keeps a machine from doing what it could, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.machine.doctor import Report
from offload_rt.machine.hardware import GIB
from offload_rt.machine.inventory import Card
from offload_rt.machine.measuring_gpu import LinkFigures

LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, by generation, before the packets' own overhead."""

COPY_SHARE = 0.7
"""Of a link's nominal rate: pinned copies reach 0.8 to 0.85 where nothing is wrong."""

POWER_SHARE = 0.7
"""Of a card's default power limit: above it, work that is bound by memory loses little."""

LOAD_SHARE = 0.25
"""Of the processors: other programs that leave less to measure with are felt in every figure."""

LOW_MEMORY_SHARE = 0.25
"""Of the memory: what should be free at least for caches to go into."""


def warnings(report: Report) -> tuple[str, ...]:
    """What is wrong with the machine, a line each, with the remedy; nothing where all is well."""
    return (*_of_cards(report), *_of_processor(report), *_of_memory(report))


def _of_cards(report: Report) -> Iterator[str]:
    by_device = {card.device: card for card in report.cards if card.device is not None}
    for device, (gpu, link) in enumerate(zip(report.hardware.gpus, report.links, strict=True)):
        name = f"GPU {device}"
        card = by_device[device]
        yield from _of_link(name, card, link, min(gpu.to_device_rate, gpu.to_host_rate))
        limit, default = card.power_limit_watts, card.power_default_watts
        if limit is not None and default is not None and limit < POWER_SHARE * default:
            yield (
                f"{name}: its power is limited to {limit:.0f} W of {default:.0f} W; raise it with"
                f" `nvidia-smi -i {card.bus or card.uuid} -pl {default:.0f}`"
            )
    unused = [card.name for card in report.cards if card.device is None]
    if unused and not by_device:
        yield (
            f"torch {report.versions.torch} cannot use {', '.join(unused)}; install a build of torch for CUDA"
            " that fits the driver (pytorch.org), and see that CUDA_VISIBLE_DEVICES does not hide it"
        )
    if by_device and report.versions.flash_attn is None:
        yield "flash-attn is missing, torch's own kernels attend instead; `pip install 'offload-rt[cuda]'`"


def _of_link(name: str, card: Card, link: LinkFigures, rate: float) -> Iterator[str]:
    if not link.pinned:
        yield (
            f"{name}: memory could not be page-locked, its copies run at a fraction of the link's rate; raise"
            " the limit (`ulimit -l unlimited`, in a container `--ulimit memlock=-1`)"
        )
    # As they are while copying: an idle card lowers its generation to save power.
    if link.width and card.link_width_most and link.width < card.link_width_most:
        yield (
            f"{name}: its link is ×{link.width} wide, the card can do ×{card.link_width_most}; put it into a"
            f" slot with {card.link_width_most} lanes from the processor, and see that no other card or disk"
            " takes half of them"
        )
    if link.generation and card.link_generation_most and link.generation < card.link_generation_most:
        yield (
            f"{name}: its link runs as PCIe {link.generation}, the card can do {card.link_generation_most};"
            " set the slot's generation to the highest in the firmware (BIOS), and do without a riser cable"
        )
    if link.pinned and link.width and link.generation in LANE_RATES:
        nominal = link.width * LANE_RATES[link.generation]
        if rate < COPY_SHARE * nominal:
            yield (
                f"{name}: copies reach {rate:.1f} GB/s of the {nominal:.1f} that PCIe {link.generation}"
                f" ×{link.width} has; end other programs that use the link or the memory, run on the"
                " processors next to the card (`numactl --cpunodebind`), and measure again with --refresh"
            )


def _of_processor(report: Report) -> Iterator[str]:
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
        remedy = {
            "no compiler": "there is no C++ compiler: install g++",
            "switched off": "OFFLOAD_RT_NATIVE=0 switches it off: unset it",
            "build failed": "its build failed: install a g++ that knows C++17 and OpenMP, and see that the"
            " cache folder (OFFLOAD_RT_CACHE) can be written",
        }[host.native_kernel]
        yield f"attention on the processor does without the native kernel; {remedy}"


def _of_memory(report: Report) -> Iterator[str]:
    host, usable = report.host, report.hardware.host
    limit = host.memory_limit_bytes
    if limit is not None and limit < host.total_bytes / 2:
        yield (
            f"the container may have {limit / GIB:.1f} of {host.total_bytes / GIB:.1f} GiB of memory; start"
            " it with more (docker: `--memory`)"
        )
    of_memory = min(host.total_bytes, limit or host.total_bytes)
    if host.available_bytes < LOW_MEMORY_SHARE * of_memory:
        yield (
            f"only {host.available_bytes / GIB:.1f} of {of_memory / GIB:.1f} GiB of memory are available; end"
            " programs that hold the rest"
        )
    if host.swap_used_bytes > GIB // 4:
        yield (
            f"{host.swap_used_bytes / GIB:.1f} GiB of memory were moved out to disk; end programs that are"
            " not needed, or read them back (`sudo swapoff -a && sudo swapon -a`)"
        )
    if report.hardware.gpus and usable.lockable_bytes < host.available_bytes / 2:
        yield (
            f"only {usable.lockable_bytes / GIB:.2f} of {host.available_bytes / GIB:.1f} GiB of available"
            " memory may be page-locked; `ulimit -l unlimited`, for good `* - memlock unlimited` in"
            " /etc/security/limits.conf, in a container `--ulimit memlock=-1`"
        )
