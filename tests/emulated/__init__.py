"""Two CUDA devices emulated on the CPU, so that tests marked `gpu` run without one."""
