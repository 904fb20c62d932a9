//! Programs of other people that may hang or never stop talking: run within limits of time and output.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qhx_base::CancelToken;

/// Interval at which a running program is looked at.
const STEP: Duration = Duration::from_millis(10);
/// Time without a further byte after which nothing more is expected of a program that has ended. A child that it
/// left behind, such as adb's server, may hold its streams open forever.
const QUIET: Duration = Duration::from_millis(500);
/// Bytes of the messages that are kept: the last ones.
const MESSAGES: usize = 64 << 10;

/// Result of a program that ended by itself.
#[derive(Debug)]
pub(super) struct Finished {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    /// End of the standard error.
    pub stderr: Vec<u8>,
}

/// Reason why there is no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// The program cannot be started, or not be waited for.
    System(std::io::Error),
    /// It took longer than its time.
    Time,
    /// It wrote more than its limit.
    Bytes,
    /// The caller asked for the work to stop.
    Cancelled,
}

/// Time and output that a program may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub time: Duration,
    /// Bytes of standard output.
    pub bytes: usize,
}

/// Part of a stream that has arrived.
#[derive(Debug, Default)]
struct Arrived {
    bytes: Vec<u8>,
    /// Bytes in all, those that were dropped, too.
    total: usize,
    ended: bool,
}

type Shared = Arc<Mutex<Arrived>>;

fn lock(shared: &Shared) -> MutexGuard<'_, Arrived> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a stream in a thread of its own, which ends with the stream. At most `limit` bytes are kept: the last ones if
/// `last`, otherwise the first ones and one more, by which an excess is seen.
fn read(stream: Option<impl Read + Send + 'static>, limit: usize, last: bool) -> Shared {
    let shared = Shared::default();
    let writer = Arc::clone(&shared);
    let Some(mut stream) = stream else {
        lock(&shared).ended = true;
        return shared;
    };
    std::thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            let mut arrived = lock(&writer);
            arrived.total += read;
            arrived.bytes.extend_from_slice(buffer.get(..read).unwrap_or_default());
            let excess = arrived.bytes.len().saturating_sub(limit);
            if last {
                arrived.bytes.drain(..excess);
            } else {
                arrived.bytes.truncate(limit + 1);
            }
        }
        lock(&writer).ended = true;
    });
    shared
}

/// Runs a program without input to its end, within `limits`. One that exceeds them is killed.
pub(super) fn run(
    command: &mut Command,
    limits: Limits,
    cancel: &CancelToken,
) -> Result<Finished, Failure> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(Failure::System)?;
    let stdout = read(child.stdout.take(), limits.bytes, false);
    let stderr = read(child.stderr.take(), MESSAGES, true);
    let start = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) => {}
            Err(e) => break Err(Failure::System(e)),
        }
        if lock(&stdout).total > limits.bytes {
            break Err(Failure::Bytes);
        }
        if cancel.is_cancelled() {
            break Err(Failure::Cancelled);
        }
        if start.elapsed() >= limits.time {
            break Err(Failure::Time);
        }
        std::thread::sleep(STEP);
    };
    let status = ended.inspect_err(|_| {
        // It may have ended meanwhile.
        let _ = child.kill();
        let _ = child.wait();
    })?;
    let total = || [&stdout, &stderr].map(|stream| lock(stream).total);
    let mut seen = (total(), Instant::now());
    while ![&stdout, &stderr].iter().all(|stream| lock(stream).ended) {
        let now = total();
        if now != seen.0 {
            seen = (now, Instant::now());
        } else if seen.1.elapsed() >= QUIET {
            break;
        }
        std::thread::sleep(STEP);
    }
    if lock(&stdout).total > limits.bytes {
        return Err(Failure::Bytes);
    }
    let take = |stream: &Shared| std::mem::take(&mut lock(stream).bytes);
    Ok(Finished { status, stdout: take(&stdout), stderr: take(&stderr) })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(line: &str, time_ms: u64, bytes: usize) -> Result<Finished, Failure> {
        let limits = Limits { time: Duration::from_millis(time_ms), bytes };
        run(Command::new("sh").args(["-c", line]), limits, &CancelToken::new())
    }

    #[test]
    fn a_program_within_its_limits_gives_all_its_output() {
        let finished = shell("echo out; echo err >&2; exit 3", 60_000, 4).expect("it ends");
        assert_eq!(finished.status.code(), Some(3));
        assert_eq!((&*finished.stdout, &*finished.stderr), (&b"out\n"[..], &b"err\n"[..]));
    }

    #[test]
    fn a_program_that_hangs_or_floods_is_killed() {
        assert!(matches!(shell("exec sleep 100", 100, 10), Err(Failure::Time)));
        assert!(matches!(shell("exec cat /dev/zero", 60_000, 1 << 20), Err(Failure::Bytes)));
        assert!(matches!(shell("printf 12345", 60_000, 4), Err(Failure::Bytes)));
        let cancel = CancelToken::new();
        cancel.cancel();
        let limits = Limits { time: Duration::from_secs(60), bytes: 10 };
        let ended = run(Command::new("sh").args(["-c", "exec sleep 100"]), limits, &cancel);
        assert!(matches!(ended, Err(Failure::Cancelled)));
    }

    #[test]
    fn a_child_left_behind_holds_nobody_up() {
        let finished = shell("sleep 30 & echo done", 20_000, 100).expect("it ends");
        assert_eq!(finished.stdout, b"done\n");
    }

    #[test]
    fn the_end_of_long_messages_is_kept() {
        let line = "head -c 200000 /dev/zero >&2; echo why >&2";
        let finished = shell(line, 60_000, 10).expect("it ends");
        assert_eq!(finished.stderr.len(), MESSAGES);
        assert!(finished.stderr.ends_with(b"why\n"));
    }
}
