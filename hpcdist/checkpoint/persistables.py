"""`save_persistables` and its like: what a model keeps, in the folder of a checkpoint.

A model is a torch module, anything else with ``state_dict`` and ``load_state_dict``, or a tree of
arrays: dicts, lists and tuples. There are no programs and executors: the model stands in the place
of either.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from hpcdist.checkpoint.holdings import is_array
from hpcdist.checkpoint.loading import load
from hpcdist.checkpoint.objects import is_object
from hpcdist.checkpoint.saving import save
from hpcdist.checkpoint.storage import named
from hpcdist.errors import UsageError


def save_persistables(
    executor: Any,
    dirname: str | os.PathLike[str],
    main_program: Any = None,
    filename: str | None = None,
) -> None:
    """Write the parameters and buffers of a model to a folder. Collective over all ranks.

    Args:
        executor: the model, if `main_program` is None; otherwise it is not looked at.
        dirname: the folder; it is made, and an older checkpoint in it is replaced.
        main_program: the model.
        filename: the name of a folder in `dirname`, in its place.

    Raises:
        UsageError: there is no model.
        CheckpointError: it cannot be written; on every rank.

    Example:
        >>> import tempfile, torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dist.io.save_persistables(None, folder, torch.nn.Linear(8, 1))

    """
    save(_model(executor, main_program), _folder(dirname, filename))


def load_persistables(
    executor: Any,
    dirname: str | os.PathLike[str],
    main_program: Any = None,
    filename: str | None = None,
) -> None:
    """Load a model from the folder that `save_persistables` wrote. Collective over all ranks.

    The number of ranks may be another one, and arrays may be cut otherwise.

    Args:
        executor: the model, if `main_program` is None; otherwise it is not looked at.
        dirname: the folder.
        main_program: the model: a module, or a tree whose arrays are filled.
        filename: the name of a folder in `dirname`, in its place.

    Raises:
        UsageError: there is no model.
        CheckpointError: there is no such checkpoint, or it is of another model; on every rank.

    Example:
        >>> import tempfile, torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> model = torch.nn.Linear(8, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dist.io.save_persistables(None, folder, model)
        ...     dist.io.load_persistables(None, folder, model)

    """
    load(_model(executor, main_program), _folder(dirname, filename))


def is_persistable(var: Any) -> bool:
    """Return whether an array or tensor is kept by its model.

    So are arrays, which a tree has for nothing else, and parameters. A tensor that is no parameter
    may be a buffer, which its module knows; the attribute `persistable` says so.

    Args:
        var: an array, a tensor or a parameter.

    Example:
        >>> import torch, hpcdist as dist
        >>> dist.io.is_persistable(torch.nn.Linear(8, 1).weight)
        True

    """
    told = getattr(var, "persistable", None)
    if isinstance(told, bool):
        return told
    kind = {base.__name__ for base in type(var).__mro__}
    return "Parameter" in kind or (is_array(var) and "Tensor" not in kind)


def load_inference_model_distributed(
    dirname: str | os.PathLike[str],
    executor: Any,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Any = None,
) -> list[Any]:
    """Load a saved model, and switch it to prediction. Collective over all ranks.

    Args:
        dirname: the folder.
        executor: the model: a checkpoint has its numbers, and Python has its code.
        model_filename: not there: a file with the structure of a model.
        params_filename: the name of a folder in `dirname`, in its place.
        pserver_endpoints: not there: parameters are on no servers.

    Returns:
        The model, the names of its inputs, and an empty list: what it returns are its outputs.

    Raises:
        UsageError: there is no model, or what is not there is asked for.
        CheckpointError: there is no such checkpoint, or it is of another model; on every rank.

    Example:
        >>> import tempfile, torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> model = torch.nn.Linear(8, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dist.io.save_persistables(None, folder, model)
        ...     model, inputs, _ = dist.io.load_inference_model_distributed(folder, model)
        >>> inputs
        ['input']

    """
    if model_filename is not None or pserver_endpoints is not None:
        raise UsageError(
            "a checkpoint has no structure of a model, and there are no parameter servers; give "
            "the model itself as executor, without model_filename and pserver_endpoints"
        )
    model = _model(executor, None)
    load(model, _folder(dirname, params_filename))
    if callable(getattr(model, "eval", None)):
        model.eval()
    forward = getattr(model, "forward", None)
    inputs = [] if forward is None else [*inspect.signature(forward).parameters]
    return [model, inputs, []]


def _model(executor: Any, program: Any) -> Any:
    model = executor if program is None else program
    if is_object(model) or isinstance(model, (dict, list, tuple)):
        return model
    raise UsageError(
        "there are no programs here: give the model, a torch module or a dict or list of arrays, "
        f"as main_program, got {program!r} and executor={executor!r}"
    )


def _folder(dirname: str | os.PathLike[str], filename: str | None) -> str:
    folder = named(dirname)
    return folder if filename is None else os.path.join(folder, filename)
