"""What a user writes in a notebook, and what is refused before anything starts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from tunewright.contract.failures import UserError
from tunewright.notebook.accelerators import SIMULATE, place
from tunewright.notebook.call import Call, run
from tunewright.notebook.on_ray import OnRay

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """What a decorator asks for, under one name for each thing."""

    num_accelerators: int | None = None
    accelerator_type: str | None = None
    remote: bool = False
    timeout: float | None = None
    simulate: bool | None = None
    packages: tuple[str, ...] = ("torch", "cloudpickle")


class Distributed(Generic[P, R]):
    """A function that runs on ranks: `function.distributed(...)`.

    `func` is the function itself. A plain call is refused, since nobody could tell which of the
    two is meant.
    """

    def __init__(self, func: Callable[P, R], request: Request, body: Callable[P, R]) -> None:
        """`body` is what a rank runs for `func`. Raises UserError when `func` is no function."""
        if not callable(func):
            raise UserError(f"the decorator is for a function, and {func!r} is none")
        functools.update_wrapper(self, func)
        self.func = func
        self._name = getattr(func, "__name__", type(func).__name__)
        self._request = request
        self._body = body

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> NoReturn:
        raise UserError(
            f"{self._name} is a distributed function: {self._name}.distributed(...) runs it on its "
            f"ranks, {self._name}.func(...) here in this process"
        )

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function with these arguments on every rank; the results by rank.

        What the ranks print appears on sys.stdout, with the rank in front. Raises the exception
        of the rank that failed first, TimeoutError after `timeout` seconds, and UserError for
        what cannot run here or cannot be sent.
        """
        request = self._request
        if request.remote:
            raise UserError(_ELSEWHERE.format(name=self._name))
        _check(request)
        asked, kind = request.num_accelerators, request.accelerator_type
        placement = place(self._name, asked, kind, _simulates(request))
        if placement.note:
            print(f"{self._name}: {placement.note}", file=sys.stderr)
        return run(Call(self._name, self._body, args, kwargs), placement, request.timeout)

    def with_overrides(self, **changes: Any) -> Distributed[P, R]:
        """The same function with other settings of the decorator."""
        given = _settings(**changes)
        return Distributed(self.func, replace(self._request, **given), self._body)

    def __repr__(self) -> str:
        return f"<distributed function {self._name}: {self._request}>"


_ELSEWHERE = (
    "{name} has remote=True, and a function is only run on this machine: drop remote=True, or, for "
    "other machines, put the function into a script, name the script in a workload file's command, "
    "and run `tunewright run FILE --target ray` or `--target databricks`"
)


def distributed(
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: str | None = None,
    simulate: bool | None = None,
) -> Callable[[Callable[P, R]], Distributed[P, R]]:
    """Run a function on several GPUs of this machine, one process each, by torchrun's launcher.

        @distributed(num_accelerators=8, accelerator_type="H100")
        def train(rate): ...

        results = train.distributed(1e-4)      # one result per rank, by rank

    Args:
        num_accelerators: Ranks, one per GPU; unset, one for each GPU that is here.
        accelerator_type: The GPUs' model; another one here is only a note.
        remote: Refused: a workload file is the way to other machines.
        timeout: Seconds after which the ranks are ended; unset, no limit.
        gpus: The older name of `num_accelerators`.
        gpu_type: The older name of `accelerator_type`.
        simulate: With too few GPUs, run as many processes on CPUs. Unset, TUNEWRIGHT_SIMULATE
            decides.
    """
    request = _request(
        num_accelerators=num_accelerators, accelerator_type=accelerator_type, remote=remote,
        timeout=timeout, gpus=gpus, gpu_type=gpu_type, simulate=simulate,
    )  # fmt: skip
    return lambda func: Distributed(func, request, func)


def ray_launch(
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: str | None = None,
    simulate: bool | None = None,
) -> Callable[[Callable[P, R]], Distributed[P, R | None]]:
    """Run a function on rank 0, connected to a Ray that has this machine's GPUs.

    The settings are those of `distributed`; so is the call. Ray is up when the function begins
    (it calls no `ray.init`) and ends with it. The other ranks' results are None.
    """
    request = _request(
        num_accelerators=num_accelerators, accelerator_type=accelerator_type, remote=remote,
        timeout=timeout, gpus=gpus, gpu_type=gpu_type, simulate=simulate,
    )  # fmt: skip
    needs = replace(request, packages=(*request.packages, "ray"))

    def decorate(func: Callable[P, R]) -> Distributed[P, R | None]:
        return Distributed(func, needs, OnRay(func))

    return decorate


def _request(**given: Any) -> Request:
    if callable(given["num_accelerators"]):
        raise UserError("the decorator needs its brackets: @distributed(num_accelerators=8)")
    return Request(**_settings(**given))


def _settings(**given: Any) -> dict[str, Any]:
    """What was given, by the newer names. Raises UserError for what makes no sense."""
    for new, old in (("num_accelerators", "gpus"), ("accelerator_type", "gpu_type")):
        older = given.pop(old, None)
        if older is not None and given.get(new) not in (None, older):
            raise UserError(f"{new}={given[new]!r} and its older name {old}={older!r} disagree")
        if older is not None:
            given[new] = older
    known = {"num_accelerators", "accelerator_type", "remote", "timeout", "simulate"}
    if unknown := given.keys() - known:
        raise UserError(f"{sorted(unknown)[0]} is no setting; there are {', '.join(sorted(known))}")
    _check_number("num_accelerators", given.get("num_accelerators"), int)
    _check_number("timeout", given.get("timeout"), (int, float))
    # "false" would count as true.
    for name in ("remote", "simulate"):
        _check_kind(name, given.get(name), bool, "True or False")
    _check_kind("accelerator_type", given.get("accelerator_type"), str, 'a name, like "H100"')
    return given


def _check_number(name: str, value: Any, kind: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        what = "a whole number of at least 1" if kind is int else "seconds, more than 0"
        raise UserError(f"{name} is {value!r}; it must be {what}")


def _check_kind(name: str, value: Any, kind: type, what: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{name} is {value!r}; it must be {what}")


def _check(request: Request) -> None:
    missing = [package for package in request.packages if find_spec(package) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} is not installed; pip install {' '.join(missing)}")


def _simulates(request: Request) -> bool:
    if request.simulate is not None:
        return request.simulate
    return os.environ.get(SIMULATE, "").lower() in ("1", "true", "yes", "on")
