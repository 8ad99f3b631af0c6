"""What Ray knows of a cluster: its address and token, its nodes, what can be placed, the interfaces of collectives."""
