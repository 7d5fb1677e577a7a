"""Identify the policy that draws a generation, so that a resumed run does not train on completions of another policy.

The weights before a generation follow from the model, the options, the rows and the generations before it. A generation
stores digests of these. A resumed run that finds the same digests would draw from the same policy, and uses the stored
completions; otherwise it draws them again.
"""

import hashlib

from swiftlite.args.resume import CHANGE_UPDATES, CHANGEABLE
from swiftlite.base.log import logger
from swiftlite.hub.digest import digest_of_model
from swiftlite.rollouts.generation import Generation
from swiftlite.runtime.agreement import digest
from swiftlite.train.phases import Run

NAME = "policy"
"""Name of the identity in the settings of a generation."""


class PolicyIdentity:
    """Identifies the policies of a run.

    Args:
        run: the run, after its data were loaded.
    """

    def __init__(self, run: Run):
        changeable = CHANGEABLE - CHANGE_UPDATES
        options = {name: str(value) for name, value in vars(run.args).items() if name not in changeable}
        del options["model"]  # its content counts, not its path
        self._of_run = {
            "the model": digest_of_model(run.hf_model.directory),
            "an option": digest(options),
            # A resumed run may have more steps, and then has other learning rates.
            "the number of steps": str(run.schedule.steps),
            "the rows": run.data.digest,
        }

    def before(self, previous: Generation | None) -> dict[str, str]:
        """Return the identity of the policy that draws the next generation, by what it depends on.

        Args:
            previous: the generation before, with the advantages that are trained on; None for the first one.
        """
        return {**self._of_run, "the generation before it": _digest_of(previous)}


def is_drawn_by(generation: Generation, identity: dict[str, str], path: object) -> bool:
    """Return whether this policy drew a stored generation. If not, a warning says what changed.

    Args:
        path: the file of the generation, for the warning.
    """
    stored = generation.settings.get(NAME)
    if stored == identity:
        return True
    reason = "it does not name the policy that drew it"
    if isinstance(stored, dict):
        changed = [name for name in identity if stored.get(name) != identity[name]]
        reason = f"another policy drew it: {' and '.join(changed)} changed"
    logger.warning("%s is not used, because %s; its completions are drawn again", path, reason)
    return False


def _digest_of(generation: Generation | None) -> str:
    """Return a digest of completions and advantages, on which the weights after a generation depend."""
    if generation is None:
        return "none"
    content = hashlib.sha256()
    for array in (generation.prompt_ids, generation.completion_lengths, generation.completion_ids):
        content.update(array.tobytes())
    content.update(generation.advantages.tobytes())
    if not generation.is_generated.all():
        content.update(generation.is_generated.tobytes())
    return content.hexdigest()
