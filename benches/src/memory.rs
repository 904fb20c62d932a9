//! Memory of the process, as the kernel counts it.

/// Peak resident set in bytes (`VmHWM`), of it what is not mapped from files at this moment
/// (`RssAnon`); zeros where the system does not say.
pub fn peak_and_anonymous() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.trim_start_matches(':').trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .map_or(0, |kilobytes| kilobytes * 1024)
    };
    (field("VmHWM"), field("RssAnon"))
}

/// Page faults of the process so far: those served from memory, and those that read a file; zeros where
/// the system does not say.
pub fn page_faults() -> (u64, u64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the program's name, which may contain anything, in parentheses.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field =
        |index: usize| rest.split_whitespace().nth(index).and_then(|n| n.parse().ok()).unwrap_or(0);
    (field(7), field(9))
}

/// Bytes of mapped files whose names end so that are in the process's page tables (`Rss` in
/// `/proc/self/smaps`): the pages that the process has touched, and those around them that the kernel
/// maps along, up to 64 KiB.
pub fn mapped_resident(name: &str) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let mut ours = false;
    let mut kilobytes = 0;
    for line in maps.lines() {
        if let Some(rest) = line.strip_prefix("Rss:") {
            let number = rest.trim().trim_end_matches("kB").trim().parse::<u64>();
            kilobytes += if ours { number.unwrap_or(0) } else { 0 };
        } else if !line.split_whitespace().next().is_some_and(|word| word.ends_with(':')) {
            ours = line.ends_with(name);
        }
    }
    kilobytes * 1024
}
