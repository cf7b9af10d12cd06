"""What the operating system and devices give: files, clocks, memory, copies."""
