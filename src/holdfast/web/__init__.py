"""The page: one web application with two hosts, the coordinator and `holdfast ui`."""
