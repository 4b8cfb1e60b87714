"""The programs in the pods: a node, a coordinator, and the watch of a machine."""
