"""Is the Hugging Face hub there? Found out in seconds, whatever the network does."""

import queue
import threading

LIMIT = 3.0


class HubError(RuntimeError):
    """The hub can't be reached, or refuses what was asked for."""


def check(repository: str, kind: str, limit: float = LIMIT) -> None:
    """Asks the hub for a repository; ``kind`` is "model" or "dataset", ``limit`` in seconds.

    The hub's address is ``HF_ENDPOINT``, else huggingface.co. With ``HF_HUB_OFFLINE=1`` nothing
    is asked: the libraries then use their cache, or fail at once.
    Raises HubError, saying why, after ``limit`` seconds at the latest.
    """
    import requests
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    answer = queue.SimpleQueue()
    silent = f"no answer in {limit:g} s"

    def ask():
        try:
            HfApi().repo_info(repository, repo_type=kind, timeout=limit)
            answer.put(None)
        except RepositoryNotFoundError:
            answer.put(f"it has no {kind} {repository!r} that you may read")
        except HfHubHTTPError as error:
            answer.put(f"it answers with HTTP status {error.response.status_code}")
        except requests.Timeout:
            answer.put(silent)
        except requests.ConnectionError:
            answer.put("no connection")
        except Exception as error:
            answer.put(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    # A name look-up can't be given a limit: the thread that waits for it is left behind.
    threading.Thread(target=ask, daemon=True).start()
    try:
        reason = answer.get(timeout=limit)
    except queue.Empty:
        reason = silent
    if reason is not None:
        raise HubError(f"the hub at {constants.ENDPOINT} can't be used: {reason}")
