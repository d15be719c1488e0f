"""What travels to the node: the contract, the data path, the recipes and the programs.

Nothing in this package imports Prefect. Importing the package itself imports nothing.
"""

__version__ = "0.1.0"
