//! Temperatures of the NPU, where the kernel shows them.

use std::fs;
use std::path::Path;

use qhx_base::{ErrorKind, files};

/// Folder where Linux and Android list thermal zones.
pub(crate) const ZONES: &str = "/sys/class/thermal";

/// Names of the NPU's zones in the kernels of Snapdragon devices.
const NAMES: [&str; 3] = ["nsp", "cdsp", "npu"];

/// Zones that are read at most.
const MAX_ZONES: usize = 128;

/// The hottest zone of the NPU below `folder`: `nspss-0: 71 °C`. `None` where no zone is named for it, or none can be
/// read.
pub(crate) fn npu_zones(folder: &Path) -> Option<String> {
    let zones = fs::read_dir(folder).ok()?.take(MAX_ZONES).filter_map(|entry| {
        let folder = entry.ok()?.path();
        let read = |file: &str| files::read_text(ErrorKind::Runtime, &folder.join(file), 256).ok();
        let name = read("type")?.trim().to_owned();
        NAMES.iter().any(|known| name.starts_with(known)).then_some(())?;
        let millis: i64 = read("temp")?.trim().parse().ok()?;
        Some((millis, name))
    });
    let (millis, name) = zones.max()?;
    Some(format!("{name}: {} °C", millis / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_zone_of_the_npu_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(npu_zones(folder.path()), None);
        for (zone, name, temp) in [
            ("thermal_zone0", "cpu-0-0", "99000"),
            ("thermal_zone1", "nspss-0", "68500"),
            ("thermal_zone2", "nspss-1", "71250"),
            ("thermal_zone3", "nspss-2", "no number"),
        ] {
            let zone = folder.path().join(zone);
            fs::create_dir(&zone).unwrap();
            fs::write(zone.join("type"), format!("{name}\n")).unwrap();
            fs::write(zone.join("temp"), format!("{temp}\n")).unwrap();
        }
        assert_eq!(npu_zones(folder.path()).as_deref(), Some("nspss-1: 71 °C"));
        assert_eq!(npu_zones(&folder.path().join("absent")), None);
    }
}
