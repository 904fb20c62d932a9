//! Feeds damaged files to targets for a time. Each target runs in a process of its own, which may panic, abort, exhaust
//! its memory or hang: whatever it does, the file that it was reading is kept.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::Target;
use crate::mutate::{Random, mutate};

/// Memory that a target may map, in KiB.
const MEMORY_KIB: u64 = 4 << 20;
/// Damaged files that are kept, to be damaged further.
const MOST_KEPT: usize = 1000;

/// Options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Duration of the run.
    pub time: Duration,
    /// Maximum time for one file.
    pub patience: Duration,
    /// Seed of the sequence of damages.
    pub seed: u64,
    /// The folder with a folder of undamaged files for each target.
    pub seeds: PathBuf,
    /// Folder to keep a file that a target does not answer.
    pub found: PathBuf,
}

/// Result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Files read.
    pub files: u64,
    /// Files read without an error.
    pub accepted: u64,
    /// Different answers, numbers and quoted words left aside.
    pub answers: u64,
}

/// A target that did not answer.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Description of how the process ended.
    pub end: String,
    /// The end of what it wrote to standard error.
    pub said: String,
    /// The file it was reading.
    pub file: PathBuf,
}

/// Reads the target's seeds and then damaged copies of them until the time is over. Before each it is written to
/// `current`.
///
/// # Errors
///
/// When the seeds cannot be read or `current` cannot be written.
pub fn feed(target: Target, options: &Options, current: &Path) -> io::Result<Counts> {
    let (start, mut random) = (Instant::now(), Random::new(options.seed));
    let mut files = seeds(&options.seeds.join(target.name))?;
    let mut counts = Counts { files: 0, accepted: 0, answers: 0 };
    let mut answers = HashSet::new();
    let undamaged = files.len();
    let mut next = 0;
    while next < undamaged || start.elapsed() < options.time {
        let file = match files.get(next) {
            Some(seed) if next < undamaged => seed.clone(),
            _ => mutate(&files, &mut random),
        };
        fs::write(current, &file)?;
        let answer = (target.read)(&file);
        counts.files += 1;
        counts.accepted += u64::from(answer.is_ok());
        let new = answers.insert(kind(&answer));
        // Without the coverage that libFuzzer measures, another answer is what tells that a file got further.
        let keep = new || (answer.is_ok() && random.below(50) == 0);
        if next >= undamaged && keep && files.len() < MOST_KEPT {
            files.push(file);
        }
        next += 1;
    }
    counts.answers = answers.len() as u64;
    Ok(counts)
}

/// The undamaged files of a target, in the order of their names.
///
/// # Errors
///
/// When the folder cannot be read, or is empty.
pub fn seeds(folder: &Path) -> io::Result<Vec<Vec<u8>>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", folder.display()));
    let entries: io::Result<Vec<_>> = fs::read_dir(folder).map_err(named)?.collect();
    let mut paths: Vec<_> = entries?.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    if paths.is_empty() {
        return Err(io::Error::other(format!("{}: no files", folder.display())));
    }
    paths.iter().map(fs::read).collect()
}

/// Hash of an answer's message, without numbers and quoted words.
fn kind(answer: &qhx_base::Result<()>) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Err(error) = answer {
        let message = error.to_string();
        // A parser of text shows the line it does not understand as `3 | …`.
        for line in message.lines().filter(|line| !line.contains(" |")) {
            let plain = line.split('"').step_by(2).flat_map(str::chars);
            plain.filter(|c| !c.is_ascii_digit()).take(400).for_each(|c| c.hash(&mut hasher));
        }
    }
    hasher.finish()
}

/// Runs a target in a process of `program`, which is this crate's program.
///
/// # Errors
///
/// When the target did not answer a file.
pub fn run(program: &Path, target: &str, options: &Options) -> Result<Counts, Fault> {
    fs::create_dir_all(&options.found).map_err(|e| broken(&options.found, &e))?;
    let place = |what: &str| options.found.join(format!("{target}.{what}"));
    let (current, stderr) = (place("current"), place("stderr"));
    let log = File::create(&stderr).map_err(|e| broken(&stderr, &e))?;
    fs::write(&current, []).map_err(|e| broken(&current, &e))?;
    let mut command = limited(program);
    command
        .args(["feed", target, &options.time.as_millis().to_string(), &options.seed.to_string()])
        .args([&options.seeds, &current])
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    let child = command.spawn().map_err(|e| broken(program, &e))?;
    let said = || {
        let text = fs::read(&stderr).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    };
    let ended = watch(child, &current, options.patience);
    let end = match ended {
        Ok((status, counts)) if status.success() => {
            let counts = counts.ok_or_else(|| fault("without a count", said(), &current))?;
            let _ = (fs::remove_file(&stderr), fs::remove_file(&current));
            return Ok(counts);
        }
        Ok((status, _)) => status.to_string(),
        Err(end) => end,
    };
    // Named by what is in it, so that the next fault does not replace it.
    let mut hasher = DefaultHasher::new();
    fs::read(&current).unwrap_or_default().hash(&mut hasher);
    let kept = place(&format!("{:016x}", hasher.finish()));
    let file = if fs::rename(&current, &kept).is_ok() { kept } else { current };
    Err(fault(&end, said(), &file))
}

/// Runs targets, as many at a time as there are processors; `report` gets what came of each.
pub fn run_all(
    program: &Path,
    targets: &[&str],
    options: &Options,
    report: impl Fn(&str, &Result<Counts, Fault>) + Sync,
) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
            report(target, &run(program, target, options));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}

/// The report of a run.
pub fn describe(target: &str, result: &Result<Counts, Fault>) -> String {
    match result {
        Ok(counts) => format!(
            "{target}: {} files, {} accepted, {} different answers",
            counts.files, counts.accepted, counts.answers
        ),
        Err(fault) => format!(
            "{target}: {}\n{}\nagain: cargo run --package qhx-fuzz -- read {target} {}",
            fault.end,
            fault.said.trim_end(),
            fault.file.display()
        ),
    }
}

/// The folder of this crate's seeds, and where what is found goes.
pub fn folders() -> [PathBuf; 2] {
    ["seeds", "found"].map(|name| qhx_paths::workspace().join("tests/fuzz").join(name))
}

fn fault(end: &str, said: String, file: &Path) -> Fault {
    Fault { end: end.to_owned(), said, file: file.to_owned() }
}

fn broken(path: &Path, error: &io::Error) -> Fault {
    fault(&format!("{}: {error}", path.display()), String::new(), path)
}

/// The program, with a bound on its memory where a shell can set one.
fn limited(program: &Path) -> Command {
    if !cfg!(unix) {
        return Command::new(program);
    }
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {MEMORY_KIB}; ulimit -c 0; exec \"$0\" \"$@\"");
    command.args(["-c", &script]).arg(program);
    command
}

/// Waits for the end; a process that reads one file for longer than `patience` is killed.
fn watch(
    mut child: Child,
    current: &Path,
    patience: Duration,
) -> Result<(ExitStatus, Option<Counts>), String> {
    let (mut changed, mut since) = (None::<SystemTime>, Instant::now());
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let printed = child.stdout.take().and_then(|out| io::read_to_string(out).ok());
                return Ok((status, printed.as_deref().and_then(Counts::parse)));
            }
            Ok(None) => {}
            Err(e) => return Err(e.to_string()),
        }
        let now = fs::metadata(current).and_then(|data| data.modified()).ok();
        if now != changed {
            (changed, since) = (now, Instant::now());
        } else if since.elapsed() > patience {
            let _ = (child.kill(), child.wait());
            return Err(format!("no answer within {} s", patience.as_secs_f32()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Counts {
    /// The counts as a process prints them for the one that started it.
    pub fn line(self) -> String {
        format!("{} {} {}", self.files, self.accepted, self.answers)
    }

    fn parse(line: &str) -> Option<Self> {
        let mut numbers = line.split_whitespace().map(|word| word.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self { files: next()?, accepted: next()?, answers: next()? })
    }
}
