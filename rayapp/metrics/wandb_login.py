"""How a process is to reach Weights & Biases, read as wandb reads it, without wandb: it asks on a terminal where it finds no key."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rayapp.config.schema import WandbSection
from rayapp.errors import Problem, RunFileError

Mode = Literal["online", "offline", "disabled"]

MODE_VARIABLE = "WANDB_MODE"
MODES: dict[str, Mode] = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
"""What ``WANDB_MODE`` may say, its old words included."""

CLOUD_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")
"""Where wandb goes by itself. Source: wandb/sdk/lib/urls.py of several versions."""


def chosen_mode(section: WandbSection, environ: Mapping[str, str]) -> Mode:
    """The mode of the run file, or else of ``WANDB_MODE``, or else online.

    Raises:
        RunFileError: ``WANDB_MODE`` says something else.
    """
    if section.mode is not None:
        return section.mode
    word = environ.get(MODE_VARIABLE) or "online"
    if word not in MODES:
        raise RunFileError(Problem(f"{MODE_VARIABLE}={word}", "is not a mode", "unset it, or set metrics.wandb.mode to online or offline"))
    return MODES[word]


def has_login(environ: Mapping[str, str]) -> bool:
    """Whether there is a key: in the environment, in wandb's settings file, or for its server in the netrc file."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _settings_file(environ)
    server = urlsplit(environ.get("WANDB_BASE_URL") or settings.get("base_url", "")).netloc
    return "api_key" in settings or _has_netrc_entry(environ, (server,) if server else CLOUD_HOSTS)


def _settings_file(environ: Mapping[str, str]) -> dict[str, str]:
    folder = environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(Path(folder).expanduser() / "settings")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # as wandb does
    return dict(parser["default"]) if parser.has_section("default") else {}


def _has_netrc_entry(environ: Mapping[str, str], hosts: tuple[str, ...]) -> bool:
    try:
        entries = netrc.netrc(Path(environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, netrc.NetrcParseError):
        return False  # as wandb does
    return any(entries.authenticators(host) for host in hosts)
