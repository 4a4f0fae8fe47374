"""Memory, traffic and time of a step, told for any number of ranks without starting one."""
