"""A device's budget, on disk: what it has spent, and the releases it has paid for."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ._spend import ROUNDING, Release, Spend, Summary, count, purpose, request_key
from .errors import InvalidParameterError, LedgerError, RequestRefusedError
from .modulation import Modulation
from .policy import Policy
from .privacy import ReplaceRecord

__all__ = ["Ledger", "Release", "Spend", "Summary", "request_key"]

_APPLICATION_ID = 0x464C4D31  # marks the file as ours: "FLM1"
_SCHEMA_VERSION = 1
_LONGEST_STUDY = 200
_BUSY_SECONDS = 30.0

_SCHEMA = (
    """
    CREATE TABLE device (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        protects TEXT NOT NULL,       -- what a unit of spend means: may never change
        policy TEXT NOT NULL,         -- the policy used last, in words
        delta REAL NOT NULL,
        budget REAL NOT NULL,         -- its μ² in all
        cost REAL NOT NULL            -- its μ² of a release
    )
    """,
    """
    CREATE TABLE spend (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,     -- digest of the request
        map TEXT NOT NULL,            -- digest of its modulation and directions
        purpose TEXT NOT NULL,        -- the request, in words
        cost REAL NOT NULL,           -- μ²
        spent_at TEXT NOT NULL,
        payload BLOB                  -- what was released; NULL until it is computed
    )
    """,
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)


class Ledger:
    """The record that keeps a device within its budget, whatever happens to it.

    Parameters
    ----------
    path : path-like
        A file on a local disk, created at the first release, readable by its owner only.

    Notes
    -----
    1. **Never a release without its spend.** The spend is committed and flushed to the
       disk before the release is computed; the release is committed and flushed before
       it is returned. What is returned is always read back from the file.
    2. **One release a spend.** A release is written only where none is kept yet. So
       after a stop between the two commits a repeat of the request may complete the
       spend: nothing had left. Two processes that work on one request both return the
       release that was kept first.
    3. **Two processes do not double-spend**: check and spend are one transaction under
       SQLite's write lock.
    4. **A repeat is free**: a request with the same key gets the same bytes.
    5. Budget and spend are squared parameters μ² of Gaussian differential privacy, which
       add up whatever was asked and however the owner changes ε, δ, the number of releases
       or the accounting. What a unit of spend *means* (relation, unit, sensitivity,
       columns) may not change.
    6. The file holds releases, labels that left as they are, and public request
       parameters; never a raw row, phase or noise draw.

    It rests on the disk honouring a flush, and on the file: deleting it, or restoring an
    old copy, forgets spends. Keep it out of backups. Network file systems are not supported.

    The rollback journal with ``synchronous=EXTRA`` is used because with ``FULL`` a power loss
    just after a commit may undo that commit: the journal's removal is not flushed.

    Examples
    --------
    >>> import tempfile, os
    >>> import numpy as np
    >>> from flwr_modulated import Distance, Guarantee, Modulation, Policy
    >>> from flwr_modulated.ledger import Ledger, Release
    >>> policy, plain = Policy(Guarantee(2.0, 1e-5, Distance(1.0))), Modulation()
    >>> mechanism = policy.mechanism(plain)
    >>> def compute():
    ...     rows = mechanism.release([[0.1, -0.4]], rng=np.random.default_rng())
    ...     return Release(rows, np.array([1.0]), mechanism.noise_std)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(os.path.join(folder, "ledger.db"))
    ...     ask = dict(policy=policy, modulation=plain, directions=np.zeros((2, 0)), study="demo")
    ...     first = ledger.release(compute, **ask)
    ...     again = ledger.release(compute, **ask)
    ...     print(ledger.summary().num_left, bool((first.released == again.released).all()))
    0 True
    """

    __slots__ = ("_path",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if str(path) in ("", ":memory:"):
            raise InvalidParameterError("path must name a file: a ledger that forgets protects nothing")
        self._path = Path(path)

    def release(
        self,
        compute: Callable[[], Release],
        *,
        policy: Policy,
        modulation: Modulation,
        directions: ArrayLike,
        study: str = "",
        index: int = 0,
    ) -> Release:
        """Spend and release once; give the same release to every repeat.

        Parameters
        ----------
        compute : callable
            Makes the release under `policy`; called at most once, after its spend is on
            the disk.
        policy : Policy
            The device's present policy. Check the request with :meth:`Policy.check` first.
        modulation : Modulation
            What the server asks for.
        directions : array_like of shape (d, m)
            The checked directions.
        study : str, default ""
            The study's name, as the server gives it.
        index : int, default 0
            Which of the study's releases is asked for: a retry must use the same number.
            Studies that want one release of each device use 0 in every round.

        Returns
        -------
        Release
            The kept release.

        Raises
        ------
        RequestRefusedError
            If the budget does not allow another release, or the study's name is too long.
        LedgerError
            If the file cannot be used.
        """
        if len(study) > _LONGEST_STUDY:
            raise RequestRefusedError(
                f"study must have at most {_LONGEST_STUDY} characters, got {len(study)}"
            )
        key, same_map = request_key(modulation, directions, study=study, index=index)
        words = purpose(modulation, study, index, np.shape(directions)[0])
        with self._transaction(create=True) as db:
            _bind(db, policy)
            number, payload = _find_or_spend(db, policy, key, same_map, words)
        if payload is None:
            computed = compute().to_bytes()
            with self._transaction() as db:
                db.execute(
                    "UPDATE spend SET payload = ? WHERE id = ? AND payload IS NULL", (computed, number)
                )
                (payload,) = db.execute("SELECT payload FROM spend WHERE id = ?", (number,)).fetchone()
        return Release.from_bytes(payload)

    def summary(self) -> Summary:
        """What has been spent, on what, and what is left.

        Raises
        ------
        LedgerError
            If there is no ledger at the path, or it cannot be read.
        """
        with self._transaction() as db:
            (verdict,) = db.execute("PRAGMA quick_check").fetchone()
            if verdict != "ok":
                raise LedgerError("the ledger is damaged; the device must not answer from it")
            device = db.execute("SELECT policy, delta, budget, cost FROM device").fetchone()
            rows = db.execute(
                "SELECT purpose, cost, spent_at, length(payload) FROM spend ORDER BY id"
            ).fetchall()
        policy, delta, budget, cost = device or ("none yet", 0.0, 0.0, 1.0)
        spends = tuple(Spend(*row) for row in rows)
        return Summary(policy, delta, budget, math.fsum(spend.cost for spend in spends), cost, spends)

    @contextmanager
    def _transaction(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        """One flushed transaction under the write lock, on a connection of its own."""
        refusal = ""
        try:
            if create:
                self._create()
            elif not self._path.is_file():
                raise LedgerError("there is no ledger at this path")
            # mode=rw: never lets SQLite make a file with other permissions.
            uri = f"{self._path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("BEGIN IMMEDIATE")
                try:
                    _check_schema(db, create=create)
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except sqlite3.Error as error:
            refusal = (
                "the ledger is in use by another process; try again"
                if "locked" in str(error)
                else f"the ledger cannot be used ({type(error).__name__}); is it this device's ledger file?"
            )
        except OSError as error:
            refusal = f"the ledger cannot be opened ({type(error).__name__})"
        if refusal:  # outside the handlers: the original text may hold a local path
            raise LedgerError(refusal)

    def _create(self) -> None:
        """Make an empty file that only its owner can read, and leave an existing one as it is."""
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        if os.name == "posix" and self._path.stat().st_mode & 0o077:
            raise LedgerError("the ledger must be readable and writable by its owner only: chmod 600")


def _check_schema(db: sqlite3.Connection, *, create: bool) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == _APPLICATION_ID and version == _SCHEMA_VERSION:
        return
    if application or version or tables:
        raise LedgerError("this is not a ledger of flwr-modulated, or one of another version")
    if not create:
        raise LedgerError("this file is empty: nothing was released from it yet")
    for statement in _SCHEMA:
        db.execute(statement)


def _bind(db: sqlite3.Connection, policy: Policy) -> None:
    """Refuse a policy under which a unit of spend would mean something else; note the present one."""
    guarantee = policy.guarantee
    present = (
        _protects(policy),
        f"{guarantee}; at most {count(policy.num_releases, 'release')}, accounting {policy.accounting}",
        float(guarantee.delta),
        policy.budget,
        policy.cost,
    )
    found = db.execute("SELECT protects, policy, delta, budget, cost FROM device").fetchone()
    if found is not None and found[0] != present[0]:
        raise RequestRefusedError(
            "the ledger was opened under another relation, unit, sensitivity or column scale, in which "
            "its spends cannot be counted; go back to that policy, or start a new ledger, knowing that "
            "what was released stays released"
        )
    if found != present:
        db.execute("INSERT OR REPLACE INTO device VALUES (1, ?, ?, ?, ?, ?)", present)


def _protects(policy: Policy) -> str:
    relation, columns = policy.guarantee.relation, policy.columns
    numbers = [relation.radius, relation.label_scale if isinstance(relation, ReplaceRecord) else 1.0]
    if columns is not None:
        numbers += [*columns.centre, *columns.scale, columns.label_centre, columns.label_scale]
    return json.dumps(
        [
            type(relation).__name__,
            policy.guarantee.unit,
            int(policy.guarantee.rows_per_client),
            policy.sensitivity,
            [float(number) for number in numbers],  # 3 and 3.0 are the same
        ]
    )


def _find_or_spend(
    db: sqlite3.Connection, policy: Policy, key: str, same_map: str, words: str
) -> tuple[int, bytes | None]:
    """Find the request's release or its spend, or spend; return the spend's number and the payload."""
    found = db.execute("SELECT id, cost, payload FROM spend WHERE key = ?", (key,)).fetchone()
    if found is not None and found[2] is not None:
        return found[0], found[2]
    # A spend that was recorded but never released counts once; if the policy has become more costly
    # since, it is topped up.
    cost = policy.cost if found is None else max(policy.cost, found[1])
    others = [other for (other,) in db.execute("SELECT cost FROM spend WHERE key != ?", (key,))]
    if math.fsum([*others, cost]) > policy.budget * (1.0 + ROUNDING):
        if policy.on_exhausted == "repeat":
            same = "SELECT id, payload FROM spend WHERE map = ? AND payload IS NOT NULL ORDER BY id DESC"
            last = db.execute(same, (same_map,)).fetchone()
            if last is not None:
                return last[0], last[1]
        raise RequestRefusedError("this device's privacy budget does not allow another release")
    if found is not None:
        db.execute("UPDATE spend SET cost = ? WHERE id = ?", (cost, found[0]))
        return found[0], None
    cursor = db.execute(
        "INSERT INTO spend (key, map, purpose, cost, spent_at) VALUES (?, ?, ?, ?, ?)",
        (key, same_map, words, cost, datetime.now(UTC).isoformat(timespec="seconds")),
    )
    return int(cursor.lastrowid or 0), None
