"""Small configs, and records without runs."""

import json

from dcnet.files import write_json
from dcnet.training import Run, recipe

SMALL = {"train_images": 60, "batch_size": 20, "width": 0.1}


def small(operator="tanh-cos", **changes):
    """A config with steps of about ten milliseconds."""
    return recipe("digits", operator=operator, **{**SMALL, "steps": 2, **changes})


def record_of(config, error=25.0, status="done", **more):
    return {
        "name": config.name,
        "hash": config.hash,
        "status": status,
        "config": config.described(),
        "curves": {},
        "results": {"test_error": error} if status == "done" else None,
        **more,
    }


def bring(folder, config, *given, name=None, **more):
    """Writes a record into a folder, as copied from another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name or config.name + '-' + config.hash}.json"
    file.write_text(json.dumps(record_of(config, *given, **more)))
    return file


def run_with(root, config, *given, **more):
    run = Run.of(config, root)
    write_json(run.record_file, record_of(config, *given, **more))
    return run
