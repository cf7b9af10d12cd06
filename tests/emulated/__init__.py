"""Two CUDA devices emulated on the CPU, so that tests marked `gpu` run without one.

`EMULATED_CUDA` names the schedule, that is how late streams are:

- `late`: work is computed once something waits for it, at the last moment and no more than needed. It finds
  reads that come too early.
- `soon`: at once, as on the CPU.
- `random`: anywhere between. It also finds a copy that overtakes a reader of its destination.
- `engine`: in the order of a virtual clock, with one copy engine per direction, which ignores priorities.
  Tests use it to see what a small copy waits for, and where the link is idle.

Memory that a stream has not computed yet, or that was given back, is NaN; a hidden wait for the device is an
error; launches and copies are counted. `EMULATED_GPUS=1` emulates one device, which tests of two use in both
parts; `EMULATED_CUDA_EVERY=1` runs all cases of slow tests.

- `gpu`: devices, their streams, copy engines and memory
- `allocator`: which segments torch's caching allocator reserves
- `cuda`: brings torch to run on them (`install`, called by `conftest.py`)

The emulation shows nothing of speed, of the arithmetic of CUDA's kernels, or of limits of the driver: `make
gpu` has the last word. `test_emulated_cuda.py` holds it to what a GPU does.
"""
