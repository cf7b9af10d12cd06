"""The offload engine over a link: its cases, what is measured of them, and the planner held against it."""
