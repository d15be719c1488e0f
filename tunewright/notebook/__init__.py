"""A function of a notebook on all GPUs of this machine: `@distributed`, `@ray_launch`.

    decorator.py     what users write, and what is refused
    accelerators.py  how many ranks fit on this machine, and what their environment says
    call.py          one call: start, output, time limit, ending, results or the rank's exception
    folder.py        the files by which the processes of a call speak to each other
    sending.py       functions, results and exceptions between them
    logs.py          new lines of the ranks' logs
    launcher.py      torchrun's launcher API, as a program below `tunewright.node`
    program.py       how these programs are started, with the notebook's own import path
    rank.py          one rank: loads the function, calls it, leaves what came of it
    on_ray.py        what `@ray_launch` puts around the function

The process of the notebook imports none of torch and ray.
"""

from tunewright.notebook.call import RankError
from tunewright.notebook.decorator import Distributed, distributed, ray_launch

__all__ = ["Distributed", "RankError", "distributed", "ray_launch"]
