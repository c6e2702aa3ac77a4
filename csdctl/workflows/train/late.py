"""Nodes of the plan that cannot be reached when a run begins, and take part once they can.

The others begin without them, with `train --min-nodes`, as after a loss: public samples are divided among
those that are there, private ones wait for their node. When a node can be reached, it gets what all others
have got, and joins the run between two steps.
"""

from dataclasses import replace

from csdctl.errors import InputError
from csdctl.job.compatibility import check_compatibility
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.shipping.deliver import deliver
from csdctl.shipping.payload import pack_payload
from csdctl.shipping.store import store_bytes
from csdctl.supervision.run_setup import PrepareNode
from csdctl.transport.session import Session
from csdctl.tuning.plan import DATA_PARALLEL
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.files import whole
from csdctl.workflows.data.prepare import load_absent
from csdctl.workflows.train.spec import ResolvedRun
from csdctl.workflows.train.strategies import Strategy
from csdctl.workflows.workspace.workspace import Workspace, unreachable_error


def check_late(job: Job, strategy: Strategy, space: Workspace, say: Say) -> None:
    """Raise the error of nodes that cannot be reached unless they can join a run later. Tell of them."""
    if not (late := space.unreachable):
        return
    is_known = not job.private_path or late.keys() == load_absent(space.project, job, late).keys()
    is_possible = strategy.name == DATA_PARALLEL and not space.whole.networks
    if not (is_known and is_possible and late.keys() <= space.facts.keys()):
        raise unreachable_error(space.whole, late)
    for error in late.values():
        say(str(error))
    say(f"starting without {', '.join(late)}: a node joins when it becomes reachable")


def prepare_late_node(resolved: ResolvedRun, spec: RunSpec) -> PrepareNode:
    """Return what prepares the machine of a node that can be reached now.

    It raises CsdctlError, or InputError where the private data is not the data that was placed.
    """
    space, prepared = resolved.context.space, resolved.context.prepared

    def prepare(session: Session) -> str:
        name, spec_of_node = session.name, spec
        if prepared.prepare_node and name in prepared.absent:
            info = prepared.prepare_node(session)
            if info.fingerprint != prepared.absent[name].fingerprint:
                raise InputError("its private data has changed since it was prepared", node=name)
            check_compatibility(prepared.model.info, {"public": prepared.public, name: info})
            ranks = [replace(rank, private=whole(info)) if rank.node == name else rank for rank in spec.ranks]
            spec_of_node = replace(spec, ranks=tuple(ranks))
        stored = store_bytes(to_json(spec_of_node).encode(), ".json", space.project.root)
        files = [*resolved.files_of(name), stored]
        deliver(session, pack_payload(files), python=space.whole.python_of(name))
        return stored.path

    return prepare
