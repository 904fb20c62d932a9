//! Executions that take far longer than others of the same graph.

use std::path::Path;
use std::time::Duration;

use qhx_base::{ErrorKind, files};

/// Executions whose median is known: the last ones.
const WINDOW: usize = 31;
/// Executions before which nothing is said of a median.
const MIN_KNOWN: usize = 8;
/// Minimum time of a slow execution, as a multiple of the median.
const MIN_RATIO: u32 = 5;
/// Minimum time of a slow execution.
const MIN_TIME: Duration = Duration::from_millis(200);

/// The times of a graph's last executions.
#[derive(Debug, Default)]
pub(super) struct ExecutionTimes {
    recent: [Duration; WINDOW],
    executions: usize,
}

impl ExecutionTimes {
    /// Adds an execution. Where it was slow, the median of those before it.
    pub(super) fn add(&mut self, time: Duration) -> Option<Duration> {
        let median = if time >= MIN_TIME { self.median() } else { None };
        self.recent[self.executions % WINDOW] = time;
        self.executions = self.executions.saturating_add(1);
        median.filter(|median| time >= median.saturating_mul(MIN_RATIO))
    }

    fn median(&self) -> Option<Duration> {
        let known = self.executions.min(WINDOW);
        let mut recent = self.recent;
        let recent = recent.get_mut(..known).filter(|_| known >= MIN_KNOWN)?;
        recent.sort_unstable();
        recent.get(known / 2).copied()
    }
}

/// Load of the host, if the system reports it: the load average over the last minute, and the number of cores.
pub(super) fn host_load() -> Option<String> {
    let text = files::read_text(ErrorKind::Runtime, Path::new("/proc/loadavg"), 256).ok()?;
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    let cores = std::thread::available_parallelism().ok()?;
    Some(format!("load average {load:.1} on {cores} cores"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn an_execution_is_slow_beside_the_median_of_the_last() {
        let mut times = ExecutionTimes::default();
        assert_eq!(times.add(ms(900)), None, "the first, which may load and compile");
        for n in 0..6 {
            assert_eq!(times.add(ms(50 + n)), None);
        }
        assert_eq!(times.add(ms(900)), None, "too few to know a median");
        assert_eq!(times.add(ms(199)), None, "short enough that nobody waits for it");
        assert_eq!(times.add(ms(1500)), Some(ms(54)));
        assert_eq!(times.add(ms(250)), None, "less than 5 times the median");
        for _ in 0..WINDOW {
            times.add(ms(1500));
        }
        assert_eq!(times.add(ms(1500)), None, "a device that is slow all the time");
    }
}
