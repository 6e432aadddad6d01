"""A group may be given as its name, a ProcessGroup, or a dimension of a DeviceMesh."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _world

WITHOUT_PROCESSES = ("fake", "threaded")  #: backends of groups whose ranks are no processes

#: What a ``group`` argument takes: a name, a ProcessGroup, a 1-D DeviceMesh, (mesh, dim); None is the default group.
Group: TypeAlias = str | ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | None


def resolve_group(group: Group = None) -> ProcessGroup:
    """The ProcessGroup meant by ``group``.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from weft import symm_mem
    >>> symm_mem.resolve_group() is dist.group.WORLD
    True
    >>> mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    >>> symm_mem.resolve_group((mesh, "tensor")).size() == dist.get_world_size()
    True

    Args:
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh, ``(mesh, dim)`` with ``dim`` an index or a
            name, or None for the default group.

    Raises:
        TypeError: it is none of these.
        ValueError: the name is unknown, the mesh has more than one dimension or not this one, or its group is gone,
            this rank is no member, or no group was initialised.
    """
    if isinstance(group, str):
        try:
            return _resolve_process_group(group)  # type: ignore[arg-type]
        except Exception as e:
            raise ValueError(f"group: no process group is named {group!r}{_named_groups(group)}") from e
    if isinstance(group, ProcessGroup):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group: is None, and torch.distributed has no default group: call init_process_group"
            )
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: the mesh has {group.ndim} dimensions; give (mesh, dim) to say which one"
            )
        return _of_member(group)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _of_dimension(*group)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group: is what new_group gave a rank that is no member, must be a group of this rank"
        )
    raise TypeError(
        f"group: must be a name, a ProcessGroup, a 1-D DeviceMesh or (DeviceMesh, dim), not {type(group).__name__}"
    )


def _named_groups(wanted: str) -> str:
    """Which groups there are, for who has taken the name of a mesh's dimension for that of a group."""
    known = sorted((pg.group_name, pg.group_desc) for pg in _world.pg_map)
    if not known:
        return ""
    names = ", ".join(repr(name) + (f" ({what})" if what else "") for name, what in known)
    return f", only {names}; a dimension of a DeviceMesh is (mesh, {wanted!r})"


def _of_dimension(mesh: DeviceMesh, dim: int | str) -> ProcessGroup:
    if isinstance(dim, bool) or not isinstance(dim, (int, str)):
        raise TypeError(f"group: the dimension of the mesh is {dim!r}, must be an index or a name")
    names = mesh.mesh_dim_names or ()
    known = dim in names if isinstance(dim, str) else -mesh.ndim <= dim < mesh.ndim
    if not known:
        named = f" named {', '.join(map(repr, names))}" if names else ""
        raise ValueError(f"group: the mesh has no dimension {dim!r}, it has {mesh.ndim}{named}")
    return _of_member(mesh, dim if isinstance(dim, str) else dim % mesh.ndim)


def _of_member(mesh: DeviceMesh, dim: int | str | None = None) -> ProcessGroup:
    try:
        return mesh.get_group(dim)
    except IndexError as e:  # a mesh has groups on its ranks only
        raise ValueError("group: the mesh does not hold this rank, must be one that does") from e
    except (RuntimeError, ValueError) as e:
        raise ValueError("group: the mesh's process group was destroyed or never made, must be there") from e


def group_of_name(name: str) -> ProcessGroup | None:
    """The group that torch knows by this name now; None if there is none."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except Exception:  # torch's own error, of several types
        return None


def group_name(group: Group = None) -> str:
    """The name under which torch knows the group; a name is passed through unresolved.

    >>> import torch.distributed as dist
    >>> from weft import symm_mem
    >>> symm_mem.group_name() == dist.group.WORLD.group_name
    True
    >>> symm_mem.group_name("tensor")
    'tensor'

    Args:
        group: as for ``resolve_group``.

    Raises:
        TypeError, ValueError: as ``resolve_group``, but for a name.
    """
    return group if isinstance(group, str) else resolve_group(group).group_name


def native_backends(group: ProcessGroup) -> str:
    """torch's own backends of a group, as its configuration names them: of the backend "weft" those inside of it.

    Raises:
        ValueError: the group has been destroyed.
    """
    config = dist.get_backend_config(group)
    if "weft" not in config:
        return config
    return ",".join(f"{kind.type}:{group._get_backend(kind).name()}" for kind in group._device_types)


def without_processes(group: ProcessGroup) -> str | None:
    """The backend of a group whose ranks are no processes."""
    names = [group.name()]
    for kind in ("cpu", "cuda"):
        try:  # a group with a backend that torch does not build in is itself called "custom"
            names.append(group._get_backend(torch.device(kind)).name())
        except RuntimeError:  # none for such a device
            continue
    return next((name for name in names if name in WITHOUT_PROCESSES), None)
