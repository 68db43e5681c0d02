"""Where Horovod's scripts look for what is not torch's."""
