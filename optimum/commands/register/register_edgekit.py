"""What optimum-cli finds of EdgeKit: it imports every file of this namespace, which has no __init__.py, on start."""

from __future__ import annotations

from optimum.commands.export.base import ExportCommand

from edgekit.integrations.optimum_command import EdgeKitExportCommand

REGISTER_COMMANDS = [(EdgeKitExportCommand, ExportCommand)]
