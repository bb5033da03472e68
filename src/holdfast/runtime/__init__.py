"""The only folder that touches the operating system: spawning, descriptors, signals, /proc, cgroups. Linux."""
