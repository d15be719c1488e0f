"""What both sides of a run agree on: workload, settings, run folder, receipt, failures.

Light on purpose (pydantic and PyYAML at most): read by the control plane and on the node.
"""
