"""Recommendations: what keeps a machine from its full speed, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.machine.inspection import Report
from offload_rt.machine.inventory import GpuFacts, PcieLink
from offload_rt.system.hardware import GIB, Gpu

LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, by generation, before the overhead of packets."""

COPY_SHARE = 0.7  # of a link's nominal rate; page-locked copies usually reach 0.8 to 0.85
LOAD_SHARE = 0.25  # of the cores: with more of them busy, every rate suffers

KERNEL_REMEDIES = {
    "no compiler": "install g++",
    "switched off": "unset OFFLOAD_RT_NATIVE, which is 0",
    "build failed": "its build failed: install a g++ that knows C++17 and OpenMP, and make sure that the"
    " cache folder (OFFLOAD_RT_CACHE) can be written",
}


def without_kernel(state: str) -> str:
    """Returns what follows from a missing native kernel (`HostFacts.native_kernel`), and the remedy."""
    return f"CPU attention is slower without the native kernel; {KERNEL_REMEDIES[state]}"


def without_triton(reason: str) -> str:
    """Returns what follows where Triton kernels do not run on a GPU (`GpuFacts.triton`), and the remedy."""
    return (
        "without Triton kernels, KV crosses the link unpacked, and verifying is slower; Triton needs a C"
        f" compiler and Python's headers, on Debian gcc and python3-dev ({reason})"
    )


def recommendations(report: Report) -> tuple[str, ...]:
    """Returns one line for each problem: the reason and the remedy."""
    return (*_for_gpus(report), *_for_host(report))


def _for_gpus(report: Report) -> Iterator[str]:
    for number, gpu in enumerate(zip(report.hardware.gpus, report.links, report.gpus, strict=True)):
        yield from (f"GPU {number}: {line}" for line in _for_gpu(*gpu))


def _for_gpu(gpu: Gpu, link: PcieLink, facts: GpuFacts) -> Iterator[str]:
    (generation, width), (newest, widest) = (
        tuple(part or 0 for part in pcie) for pcie in (link, facts.max_link)
    )
    if 0 < generation < newest or 0 < width < widest:
        yield (
            f"its link runs as PCIe {generation} ×{width}, the GPU supports PCIe {newest} ×{widest}; use a"
            " slot with that many lanes from the processor, which no other device shares, set its generation"
            " to the highest in the firmware (BIOS), and avoid riser cables"
        )
    nominal, rate = width * LANE_RATES.get(generation, 0.0), min(gpu.to_device_rate, gpu.to_host_rate)
    if rate < COPY_SHARE * nominal:
        yield (
            f"copies reach {rate:.1f} GB/s of the {nominal:.1f} GB/s of PCIe {generation} ×{width}; end other"
            " programs that use the link or the memory, run on the NUMA node of the GPU (`numactl"
            " --cpunodebind`), and measure again with --refresh"
        )

    if facts.triton is not None:
        yield without_triton(facts.triton)


def _for_host(report: Report) -> Iterator[str]:
    host, lockable = report.host, report.hardware.host.lockable_bytes
    if report.load_average > max(1.0, LOAD_SHARE * host.cores_of_machine):
        yield (
            f"the load average was {report.load_average:.1f} on {host.cores_of_machine} cores, so the"
            " rates are too low; measure again with --refresh on a quiet machine"
        )
    if host.native_kernel != "built":
        yield without_kernel(host.native_kernel)
    if report.hardware.gpus and lockable < host.available_bytes / 2:
        locked = (
            f"only {lockable / GIB:.2f} of {host.available_bytes / GIB:.1f} GiB of available memory can be"
        )
        if host.wsl:
            yield (
                f"{locked} page-locked under WSL2, and other memory is copied several times slower; boot"
                " Linux itself for KV that is larger"
            )
            return
        yield (
            f"{locked} page-locked; `ulimit -l unlimited`, permanently `* - memlock unlimited` in"
            " /etc/security/limits.conf, in a container `--ulimit memlock=-1`"
        )
