"""The Databricks target: `target` is what a run is given, the rest its parts."""
