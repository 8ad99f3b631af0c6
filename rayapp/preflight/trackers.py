"""What a run needs for its experiment trackers, as far as it can be seen from where the run is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from rayapp.config.schema import MlflowSection, RunFile
from rayapp.errors import Problem, RunFileError
from rayapp.metrics.mlflow import URI_VARIABLE
from rayapp.metrics.tracker import without_passwords
from rayapp.metrics.wandb_login import chosen_mode, has_login

DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
SERVER_SCHEMES = ("http", "https")
SCHEMES = (*SERVER_SCHEMES, *DATABASE_SCHEMES, "file", "databricks")
URI_REMEDY = "use http://host:5000, sqlite:////absolute/path.db, databricks, or an absolute folder"


def tracker_problems(file: RunFile) -> list[Problem]:
    """What is missing or wrong. The workers' environment is taken to be this one, with ``resources.env``."""
    environ = {**os.environ, **file.resources.env}
    return [*_mlflow(file, environ), *_wandb(file, environ)]


def _mlflow(file: RunFile, environ: Mapping[str, str]) -> list[Problem]:
    section = file.metrics.mlflow
    if section is None:
        return []
    uri = section.tracking_uri if section.tracking_uri is not None else environ.get(URI_VARIABLE) or None
    subject = "metrics.mlflow.tracking_uri" if section.tracking_uri is not None else URI_VARIABLE
    packages = ("mlflow", "sqlalchemy", "alembic") if uri is None or _scheme(uri) in DATABASE_SCHEMES else ("mlflow",)
    problems = _missing("mlflow", packages)
    if uri is not None:
        rule = _what_is_wrong(uri)
        if rule is not None:
            problems.append(Problem(f"{subject}={without_passwords(uri)}", rule, URI_REMEDY))
    return problems + _password(section)


def _wandb(file: RunFile, environ: Mapping[str, str]) -> list[Problem]:
    section = file.metrics.wandb
    if section is None:
        return []
    problems = _missing("wandb", ("wandb",))
    try:
        mode = chosen_mode(section, environ)
    except RunFileError as error:
        return [*problems, *error.problems]
    if mode == "online" and not has_login(environ):
        rule = "needs a key, and none was found: not in WANDB_API_KEY, wandb's settings or the netrc file"
        remedy = "set WANDB_API_KEY, here and for the workers, or run `wandb login`, or set metrics.wandb.mode=offline"
        problems.append(Problem("metrics.wandb.mode=online", rule, remedy))
    return problems


def _missing(section: str, packages: tuple[str, ...]) -> list[Problem]:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if not missing:
        return []
    remedy = f"pip install 'rayapp[{section}]', here and on every node, or leave metrics.{section} out"
    return [Problem(f"metrics.{section}", f"needs what is not installed: {', '.join(missing)}", remedy)]


def _scheme(uri: str) -> str:
    """``postgresql`` of ``postgresql+psycopg2://...``; empty for a path, and where there is no telling."""
    return (_split(uri) or urlsplit("")).scheme.partition("+")[0]


def _split(uri: str) -> SplitResult | None:
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018 - it is parsed, and refused, when it is asked for
    except ValueError:
        return None
    return parts


def _what_is_wrong(uri: str) -> str | None:
    parts, scheme = _split(uri), _scheme(uri)
    if parts is None:
        return "is not a URI"
    disposable = "is a relative path, and workers start in folders that are thrown away"
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="mlflow.tracking_store")}
    rules = {
        "names no host": scheme in SERVER_SCHEMES and not parts.hostname,
        disposable: scheme in ("", "file") and not parts.path.startswith("/") and uri != "databricks",
        f"{disposable} (an absolute one has four slashes)": scheme == "sqlite" and not parts.path.startswith("//"),
        f"has a scheme that MLflow does not know: {scheme}": scheme not in ("", *SCHEMES, *plugins),
    }
    return next((rule for rule, is_broken in rules.items() if is_broken), None)


def _password(section: MlflowSection) -> list[Problem]:
    parts = _split(section.tracking_uri or "")
    if parts is None or parts.password is None:
        return []
    remedy = f"leave it out and set {URI_VARIABLE}, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, for the workers"
    return [Problem("metrics.mlflow.tracking_uri", "has a password in it, which would be stored with the run", remedy)]
