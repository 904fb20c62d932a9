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
