"""Convert the exceptions of the hub's client to UserErrors with a hint."""

from collections.abc import Iterator
from contextlib import contextmanager

from swiftlite.base.errors import UserError, is_of_storage, reason_of
from swiftlite.hub.name import HubName

_LOG_IN = "run hf auth login, or set HF_TOKEN, for an account with read access"


@contextmanager
def refusals(name: HubName, doing: str = "read") -> Iterator[None]:
    """Convert exceptions of huggingface_hub and datasets that are raised inside the context.

    Raises:
        UserError: one of these packages raised an exception.
    """
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{name.repository}"
    if name.kind == "dataset":
        where = f"{constants.ENDPOINT}/datasets/{name.repository}"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{name.repository} is gated and requires access", f"request access at {where}, then {_LOG_IN}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name.repository} does not exist as a path, nor as a public {name.kind} on {constants.ENDPOINT}",
            f"check the name; if it is private, {_LOG_IN}",
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name.repository} has no revision {name.revision}", f"see {where}/tree/main") from None
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise _not_cached(name) from None
        cause = error.__cause__ or error
        if isinstance(cause, errors.HfHubHTTPError):
            raise _refused(name, cause, doing) from None
        raise _unreachable(name, cause, doing) from None
    except errors.HfHubHTTPError as error:
        raise _refused(name, error, doing) from None
    except errors.HFValidationError as error:
        raise UserError(f"{name} is not a valid name on the hub: {reason_of(error)}", "use ORG/NAME") from None
    except errors.HTTPError as error:  # connection failed  # pyright: ignore[reportPrivateImportUsage]
        raise _unreachable(name, error, doing) from None
    except OSError as error:
        if is_of_storage(error):
            raise UserError(
                f"{name} cannot be stored in {constants.HF_HOME}: {reason_of(error)}",
                "free disk space, or export HF_HOME=DIR on another disk, then run the same command again",
            ) from None
        if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):
            raise _not_cached(name) from None
        raise _unreachable(name, error, doing) from None


def _not_cached(name: HubName) -> UserError:
    command = "hf download"
    if name.kind == "dataset":
        command += " --repo-type dataset"
    command += f" {name.repository}"
    if name.revision:
        command += f" --revision {name.revision}"
    return UserError(
        f"{name} does not exist as a path and is not completely cached, and HF_HUB_OFFLINE disables downloads",
        f"unset HF_HUB_OFFLINE, or run on a machine with network: {command}",
    )


def _unreachable(name: HubName, error: BaseException, doing: str) -> UserError:
    from huggingface_hub import constants

    if doing != "read":
        return UserError(
            f"{constants.ENDPOINT} cannot be reached: {reason_of(error)}",
            "check the network (HTTPS_PROXY, HF_ENDPOINT)",
        )
    return UserError(
        f"{name} cannot be downloaded from {constants.ENDPOINT}: {reason_of(error)}",
        "check the network (HTTPS_PROXY, HF_ENDPOINT) and run the same command again to resume; or give a local path",
    )


def _refused(name: HubName, error: BaseException, doing: str) -> UserError:
    from huggingface_hub import constants

    status = error.response.status_code  # pyright: ignore[reportAttributeAccessIssue]
    if status == 401:
        return UserError(f"{constants.ENDPOINT} rejected the token", "run hf auth login, or set another HF_TOKEN")
    if status == 403:
        access = "read"
        if doing != "read":
            access = "write"
        return UserError(
            f"the token has no {access} access to {name.repository}",
            f"run hf auth login, or set HF_TOKEN, for an account with {access} access",
        )
    if status == 429:
        return UserError(f"{constants.ENDPOINT} received too many requests", "wait some minutes, or log in")
    return _unreachable(name, error, doing)
