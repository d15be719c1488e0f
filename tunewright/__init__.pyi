from tunewright.notebook import distributed as distributed
from tunewright.notebook import ray_launch as ray_launch

__version__: str
