//! Facts about a phone: its model, chip and Android, and how warm it is.

use std::collections::BTreeMap;

use serde::Serialize;

/// Properties of Android, by their names in the report.
const PROPERTIES: [(&str, &str); 9] = [
    ("manufacturer", "ro.product.manufacturer"),
    ("model", "ro.product.model"),
    ("soc_manufacturer", "ro.soc.manufacturer"),
    ("soc_model", "ro.soc.model"),
    ("platform", "ro.board.platform"),
    ("android", "ro.build.version.release"),
    ("sdk", "ro.build.version.sdk"),
    ("security_patch", "ro.build.version.security_patch"),
    ("build", "ro.build.id"),
];
/// Characters of one fact.
const MAX: usize = 200;

/// Model, chip and Android of a phone. Nothing here names one phone among others of its model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// First eight digits of the SHA-256 of the serial number, which tell the phones of one user apart.
    pub id: String,
    /// Hexagon architecture, where the chip's name says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<u32>,
    /// Facts that Android gave, by name: manufacturer, model, `soc_model`, android, sdk, kernel, cores, `memory_kb` …
    #[serde(flatten)]
    pub facts: BTreeMap<String, String>,
}

/// Warmth and charge of a phone at one time. A fact that Android does not give is left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Warmth {
    /// Charge of the battery in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub battery_percent: Option<u32>,
    /// Temperature of the battery in degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub battery_celsius: Option<f64>,
    /// It is being charged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub powered: Option<bool>,
    /// Android's thermal status: 0 none, 1 light, 2 moderate, 3 severe, 4 critical, 5 emergency, 6 shutdown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thermal_status: Option<u32>,
    /// Memory that is free, in kB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_available_kb: Option<u64>,
}

/// Line of shell that prints the facts, each as `name=value`.
pub(super) fn line() -> String {
    let mut line = String::new();
    for (name, property) in PROPERTIES {
        line.push_str(&format!("echo \"{name}=$(getprop {property})\"; "));
    }
    line.push_str(
        "echo \"kernel=$(uname -r)\"; echo \"cores=$(nproc)\"; echo \"memory_kb=$(grep MemTotal /proc/meminfo)\"; true",
    );
    line
}

/// Facts of what that line printed.
pub(super) fn read(printed: &str) -> BTreeMap<String, String> {
    let known = |name: &str| {
        ["kernel", "cores", "memory_kb"].contains(&name)
            || PROPERTIES.iter().any(|(known, _)| *known == name)
    };
    let fact = |line: &str| {
        let (name, value) = line.trim_end_matches('\r').split_once('=')?;
        let value: String = match name {
            "memory_kb" => value.chars().filter(char::is_ascii_digit).take(MAX).collect(),
            _ => value.trim().chars().take(MAX).collect(),
        };
        (known(name) && !value.is_empty()).then(|| (name.to_owned(), value))
    };
    printed.lines().filter_map(fact).collect()
}

/// Line of shell that prints warmth and charge.
pub(super) const WARMTH: &str = "dumpsys battery; dumpsys thermalservice | grep -i 'thermal status'; \
                                 grep MemAvailable /proc/meminfo; true";

/// Warmth and charge of what that line printed.
pub(super) fn warmth(printed: &str) -> Warmth {
    let mut found = Warmth::default();
    for line in printed.lines() {
        let Some((name, value)) = line.trim().split_once(':') else { continue };
        let value = value.trim();
        match name.trim() {
            "level" => found.battery_percent = value.parse().ok(),
            "temperature" => {
                found.battery_celsius =
                    value.parse::<i32>().ok().map(|tenths| f64::from(tenths) / 10.0);
            }
            "AC powered" | "USB powered" | "Wireless powered" | "Dock powered" => {
                found.powered = Some(found.powered == Some(true) || value == "true");
            }
            "MemAvailable" => {
                found.memory_available_kb = value.trim_end_matches("kB").trim().parse().ok();
            }
            name if name.eq_ignore_ascii_case("thermal status") => {
                found.thermal_status = value.parse().ok();
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_a_phone_are_read_with_either_line_end() {
        let printed = "manufacturer=OnePlus\r\nmodel=a=b\r\nsoc_model=\r\nmemory_kb=MemTotal:  15 kB\r\nevil=1\r\n";
        let found = read(printed);
        let expected = [("manufacturer", "OnePlus"), ("memory_kb", "15"), ("model", "a=b")];
        assert!(found.iter().map(|(name, value)| (&**name, &**value)).eq(expected), "{found:?}");
    }

    #[test]
    fn warmth_is_what_android_gives() {
        let printed = "Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  level: 83\n  \
                       temperature: 312\nThermal Status: 1\nMemAvailable:    4096 kB\n";
        let expected = Warmth {
            battery_percent: Some(83),
            battery_celsius: Some(31.2),
            powered: Some(true),
            thermal_status: Some(1),
            memory_available_kb: Some(4096),
        };
        assert_eq!(warmth(printed), expected);
        assert_eq!(warmth("level: many\ntemperature: 99999999999\n"), Warmth::default());
    }
}
