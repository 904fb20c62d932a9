//! Names that a server goes by.

use std::net::IpAddr;

/// Names that requests may have in their `host`: addresses, `localhost`, the machine's own name, and those that the
/// operator allows. Any other one may be a name that somebody gave to this address, so that a page of theirs counts as
/// the server's own.
#[derive(Debug)]
pub(crate) struct Hosts(Vec<String>);

impl Hosts {
    pub(crate) fn new(allowed: &[String]) -> Self {
        let machine = machine().map(|name| name.trim().trim_end_matches('.').to_lowercase());
        let machine = machine.filter(|name| !name.is_empty()).into_iter().flat_map(|name| {
            let short = name.split('.').next().unwrap_or_default().to_owned();
            let local = format!("{short}.local");
            [name, short, local]
        });
        let allowed = allowed.iter().map(|name| name.trim_end_matches('.').to_lowercase());
        Self(allowed.chain(machine).chain(["localhost".to_owned()]).collect())
    }

    /// True for the value of a `host` header that names this server. One that is missing comes from no browser.
    pub(crate) fn are_named(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|c| c.is_ascii_digit()) => name,
            _ => host,
        };
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let name = name.trim_end_matches('.');
        host.is_empty()
            || address.unwrap_or(name).parse::<IpAddr>().is_ok()
            || self.0.iter().any(|known| known == "*" || name.eq_ignore_ascii_case(known))
    }
}

/// The machine's name, where the system says it without a call of its own.
fn machine() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| {
        let name = std::env::var("COMPUTERNAME");
        name.ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_server_are_its_own() {
        let hosts = Hosts::new(&["Models.example.org".to_owned()]);
        for own in [
            "",
            "localhost",
            "LOCALHOST:8080",
            "localhost.:80",
            "127.0.0.1:1",
            "[::1]:8080",
            "[::1]",
            "192.168.1.7",
            "models.example.org:8080",
        ] {
            assert!(hosts.are_named(own), "{own}");
        }
        for other in
            ["evil.example", "evil.example:80", "localhost.evil.example", "[::1].evil", ":80"]
        {
            assert!(!hosts.are_named(other), "{other}");
        }
        if let Some(name) = machine() {
            assert!(hosts.are_named(&format!("{}:8080", name.trim())));
        }
    }
}
