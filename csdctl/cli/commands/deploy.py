"""`csdctl deploy`."""

from dataclasses import asdict

from csdctl.cli.options import (
    DEFAULT_FLEET,
    DEFAULT_JOB,
    ExcludeOption,
    FleetOption,
    JobArgument,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams


def deploy(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Bring worker and model to every node; what is there already is not sent again."""
    from csdctl.cli.render.numbers import show_bytes
    from csdctl.job.model import load_job
    from csdctl.shipping.store import Delivery
    from csdctl.workflows.deploy import common_files, deploy_files
    from csdctl.workflows.partial import choose_fleet
    from csdctl.workflows.prepare import prepare_job
    from csdctl.workflows.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)

    def show(node: str, delivery: Delivery) -> None:
        streams.say(
            f"{node}: {delivery.num_sent} files sent ({show_bytes(delivery.bytes_sent)}), "
            f"{delivery.num_present} there already"
        )

    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet) as space:
        prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say)
        files = {node.name: common_files(prepared) for node in space.fleet.nodes}
        deliveries = deploy_files(files, space.sessions, show)
    streams.result(
        {
            "schema": "csdctl.deploy/1",
            "nodes": {name: asdict(delivery) for name, delivery in deliveries.items()},
        }
    )
