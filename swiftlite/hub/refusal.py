"""Convert the exceptions of the hub's client to UserErrors that say what to type next."""

from collections.abc import Iterator
from contextlib import contextmanager

from swiftlite.errors import UserError, is_of_storage, reason_of
from swiftlite.hub.name import HubName

_LOG_IN = "hf auth login, or set HF_TOKEN, of an account that may read it"


@contextmanager
def refusals(name: HubName, doing: str = "read") -> Iterator[None]:
    """Convert the exceptions of calls to huggingface_hub and datasets.

    Raises:
        UserError: instead of their exceptions.
    """
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{name.repository} is gated: its owner says who may read it", f"ask for access at {where}, then {_LOG_IN}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{constants.ENDPOINT} has no {name.kind} {name.repository}, or it is private; and no such path is here",
            f"look at the name; if it is private, {_LOG_IN}",
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name.repository} has no revision {name.revision}", f"look at {where}/tree/main") from None
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise _not_cached(name) from None
        cause = error.__cause__ or error
        is_refusal = isinstance(cause, errors.HfHubHTTPError)
        raise (_refused(name, cause, doing) if is_refusal else _unreachable(name, cause, doing)) from None
    except errors.HfHubHTTPError as error:
        raise _refused(name, error, doing) from None
    except errors.HFValidationError as error:
        raise UserError(f"{name} is no name that the hub could have: {reason_of(error)}", "ORG/NAME") from None
    except errors.HTTPError as error:  # connection failed  # pyright: ignore[reportPrivateImportUsage]
        raise _unreachable(name, error, doing) from None
    except OSError as error:
        if is_of_storage(error):
            raise UserError(
                f"{name} cannot be kept in {constants.HF_HOME}: {reason_of(error)}",
                "make room, or export HF_HOME=DIR on another disk, and run the same command again",
            ) from None
        if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):
            raise _not_cached(name) from None
        raise _unreachable(name, error, doing) from None


def _not_cached(name: HubName) -> UserError:
    kind = " --repo-type dataset" if name.kind == "dataset" else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return UserError(
        f"{name} is not in the cache as a whole, and HF_HUB_OFFLINE forbids to ask for it",
        f"unset HF_HUB_OFFLINE; or, where there is a network: hf download{kind} {name.repository}{revision}",
    )


def _unreachable(name: HubName, error: BaseException, doing: str) -> UserError:
    from huggingface_hub import constants

    if doing != "read":
        return UserError(
            f"{constants.ENDPOINT} cannot be reached: {reason_of(error)}",
            "look at the network (HTTPS_PROXY, HF_ENDPOINT)",
        )
    return UserError(
        f"{name} cannot be fetched from {constants.ENDPOINT}: {reason_of(error)}",
        "look at the network (HTTPS_PROXY, HF_ENDPOINT) and run the same command again: what is there is not fetched "
        "twice. A directory or file that you have is given by its path",
    )


def _refused(name: HubName, error: BaseException, doing: str) -> UserError:
    from huggingface_hub import constants

    status = error.response.status_code  # pyright: ignore[reportAttributeAccessIssue]
    if status == 401:
        return UserError(f"{constants.ENDPOINT} does not know this token", "hf auth login, or set another HF_TOKEN")
    if status == 403:
        return UserError(
            f"this token may not {doing} {name.repository}", f"take another: {_LOG_IN.replace('read', doing)}"
        )
    if status == 429:
        return UserError(f"{constants.ENDPOINT} has had too many requests from here", "wait some minutes; log in")
    return _unreachable(name, error, doing)
