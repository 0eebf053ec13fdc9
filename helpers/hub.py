"""Is the Hugging Face hub there? Found out in seconds, whatever the network does."""

import queue
import threading
from contextlib import contextmanager

LIMIT = 3.0
# A small file that every repository of the kind has.
FILES = {"model": "config.json", "dataset": "README.md"}


class HubError(RuntimeError):
    """The hub can't be reached, or refuses what was asked for."""


@contextmanager
def offline():
    """A block in which the libraries use what they have cached, and ask nobody."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def check(repository: str, kind: str, limit: float = LIMIT) -> None:
    """Asks the hub for a file of a repository; ``kind`` is "model" or "dataset".

    The hub's address is ``HF_ENDPOINT``, else huggingface.co. With ``HF_HUB_OFFLINE=1`` nothing
    is asked: the libraries then use their cache, or fail at once.
    Raises HubError, saying why, after ``limit`` seconds at the latest.
    """
    import requests
    from huggingface_hub import constants, errors, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if constants.HF_HUB_OFFLINE:
        return
    answer = queue.SimpleQueue()
    silent = f"no answer in {limit:g} s"

    def ask():
        try:
            url = hf_hub_url(repository, FILES[kind], repo_type=kind)
            reply = get_session().head(
                url, headers=build_hf_headers(), timeout=limit, allow_redirects=True
            )
            hf_raise_for_status(reply)
            answer.put(None)
        except errors.RepositoryNotFoundError:
            answer.put(f"it has no {kind} {repository!r} that you may read")
        except errors.HfHubHTTPError as error:
            answer.put(f"it answers with HTTP status {error.response.status_code}")
        except requests.Timeout:
            answer.put(silent)
        except requests.ConnectionError:
            answer.put("no connection")
        except Exception as error:
            answer.put(f"{type(error).__name__}: {error}")

    # A name look-up can't be given a limit: the thread that waits for it is left behind.
    threading.Thread(target=ask, daemon=True).start()
    try:
        reason = answer.get(timeout=limit)
    except queue.Empty:
        reason = silent
    if reason is not None:
        raise HubError(f"the hub at {constants.ENDPOINT} can't be used: {reason}")
