"""Starting processes and watching over them: engines, the zygote, the supervisor.

Nothing is imported here: `start_zygote` should run before anything slow is imported, so that the zygote's own
imports go on meanwhile.
"""
