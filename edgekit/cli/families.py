"""`edgekit families`: the models that EdgeKit knows."""

from __future__ import annotations

import click

from edgekit.cli.options import json_option, verbose_option
from edgekit.cli.output import print_json


@click.command
@json_option
@verbose_option
def families(*, json: bool) -> None:
    """Lists the known model families."""
    from edgekit.families import FAMILIES

    known = [
        {
            "name": family.name,
            "model_types": family.model_types,
            "gguf_architectures": family.gguf_architectures,
            "covers": family.covers,
        }
        for family in FAMILIES
    ]
    if json:
        print_json(known)
        return
    for family in known:
        click.echo(f"{family['name']}: {family['covers']}")
        click.echo(f"    model_type in config.json: {', '.join(family['model_types'])}")
        click.echo(f"    general.architecture in GGUF: {', '.join(family['gguf_architectures'])}")
