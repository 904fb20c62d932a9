//! Energy that the system measures: counters of the processor's packages (RAPL), or a battery that discharges.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use qhx_base::{Error, ErrorKind, Result, files};

/// Folder of batteries and counters under Linux and Android.
const SYSTEM: &str = "/sys/class";
/// Time between two looks at a battery, whose gauge is read over a slow bus.
const INTERVAL: Duration = Duration::from_millis(200);
/// A file of a gauge or a counter is not longer.
const MAX_FILE: u64 = 4096;

/// Measures the energy of the whole machine, or of its processors, while something runs.
#[derive(Debug, Clone)]
pub struct EnergyMeter(Source);

#[derive(Debug, Clone)]
enum Source {
    /// Folders of packages.
    Rapl(Vec<PathBuf>),
    /// The battery's folder.
    Battery(PathBuf),
}

impl EnergyMeter {
    /// The system's: its packages where their counters may be read, otherwise its battery.
    ///
    /// # Errors
    /// When it has neither.
    pub fn system() -> Result<Self> {
        Self::within(Path::new(SYSTEM))
    }

    /// Same as [`EnergyMeter::system`], with another folder that has `powercap` and `power_supply`, as `/sys/class`
    /// has.
    ///
    /// # Errors
    /// When neither can be read there.
    pub fn within(folder: &Path) -> Result<Self> {
        let zones = folders(&folder.join("powercap"));
        // Zones of parts, such as `intel-rapl:0:1`, are counted in their package.
        let packages = zones.into_iter().filter(|zone| {
            text(zone, "name").is_some_and(|name| name.starts_with("package"))
                && counter(zone, "energy_uj").is_some()
        });
        let mut packages: Vec<_> = packages.collect();
        // The same package may be shown twice, by registers and by mapped memory.
        packages.sort_by_cached_key(|zone| text(zone, "name"));
        packages.dedup_by_key(|zone| text(zone, "name"));
        if !packages.is_empty() {
            return Ok(Self(Source::Rapl(packages)));
        }
        let battery = folders(&folder.join("power_supply")).into_iter().find(|supply| {
            text(supply, "type").as_deref() == Some("Battery") && watts(supply).is_some()
        });
        battery.map(|supply| Self(Source::Battery(supply))).ok_or_else(|| {
            let message = format!(
                "energy: found no package in {0}/powercap whose energy_uj may be read, and no battery in \
                 {0}/power_supply that discharges",
                folder.display()
            );
            Error::new(ErrorKind::Io, message)
                .hint("unplug the device, or let this user read energy_uj, which often belongs to root")
        })
    }

    /// Name of the energy source: `rapl` or `battery`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            Source::Rapl(_) => "rapl",
            Source::Battery(_) => "battery",
        }
    }

    /// Does `work`. Returns what it returned and the joules of that time, where they could be read all along.
    pub fn measure<T>(&self, work: impl FnOnce() -> T) -> (T, Option<f64>) {
        match &self.0 {
            Source::Rapl(packages) => {
                let before: Vec<_> =
                    packages.iter().map(|zone| counter(zone, "energy_uj")).collect();
                let result = work();
                let mut joules = Some(0.0);
                for (zone, before) in packages.iter().zip(before) {
                    let more = before.and_then(|before| since(zone, before));
                    joules = joules.zip(more).map(|(all, more)| all + more);
                }
                (result, joules)
            }
            Source::Battery(supply) => {
                let (running, stopped) = mpsc::channel::<()>();
                let supply = supply.clone();
                let sampler =
                    thread::Builder::new().name("qhx-energy".to_owned()).spawn(move || {
                        let (mut sum, mut samples) = (0.0, 0_u32);
                        loop {
                            sum += watts(&supply)?;
                            samples += 1;
                            if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                                return Some(sum / f64::from(samples));
                            }
                        }
                    });
                let start = Instant::now();
                let result = work();
                let seconds = start.elapsed().as_secs_f64();
                drop(running);
                let power = sampler.ok().and_then(|sampler| sampler.join().ok()).flatten();
                (result, power.map(|power| power * seconds))
            }
        }
    }
}

/// Joules of a package since its counter was `before`.
fn since(zone: &Path, before: f64) -> Option<f64> {
    let now = counter(zone, "energy_uj")?;
    // It begins again at the end of its range.
    let wrapped = if now < before { counter(zone, "max_energy_range_uj")? } else { 0.0 };
    Some((now + wrapped - before) / 1e6)
}

/// The power that a battery gives; none while it is charged.
fn watts(supply: &Path) -> Option<f64> {
    if text(supply, "status")? != "Discharging" {
        return None;
    }
    // Some gauges count what leaves the battery as less than nothing.
    let microwatts = counter(supply, "power_now")
        .or_else(|| Some(counter(supply, "current_now")? * counter(supply, "voltage_now")? / 1e6));
    microwatts.map(|power| power.abs() / 1e6).filter(|power| *power > 0.0)
}

/// Entries of a folder; none if it cannot be read.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn text(folder: &Path, name: &str) -> Option<String> {
    let text = files::read_text(ErrorKind::Io, &folder.join(name), MAX_FILE).ok()?;
    Some(text.trim().to_owned())
}

fn counter(folder: &Path, name: &str) -> Option<f64> {
    text(folder, name)?.parse::<i64>().ok().map(|value| value as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, of: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = folder.join(of);
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
        folder
    }

    #[test]
    fn packages_are_counted_once_and_over_their_range() {
        let folder = tempfile::tempdir().unwrap();
        let files =
            [("name", "package-0"), ("energy_uj", "9000000"), ("max_energy_range_uj", "10000000")];
        let zone = write(folder.path(), "powercap/intel-rapl:0", &files);
        write(folder.path(), "powercap/intel-rapl-mmio:0", &files);
        let core = [("name", "core"), ("energy_uj", "1")];
        write(folder.path(), "powercap/intel-rapl:0:0", &core);
        let meter = EnergyMeter::within(folder.path()).unwrap();
        assert_eq!(meter.name(), "rapl");
        // By 3 J, over the end of the range; both views of the package show it.
        let (seven, joules) = meter.measure(|| {
            for of in ["intel-rapl:0", "intel-rapl-mmio:0"] {
                write(folder.path(), &format!("powercap/{of}"), &[("energy_uj", "2000000")]);
            }
            7
        });
        assert_eq!((seven, joules), (7, Some(3.0)));
        // A counter that goes away leaves nothing to tell.
        let (_, joules) = meter.measure(|| fs::remove_dir_all(folder.path().join("powercap")));
        assert_eq!(joules, None);
        assert!(!zone.exists());
    }

    #[test]
    fn a_battery_counts_while_it_discharges() {
        let folder = tempfile::tempdir().unwrap();
        let error = EnergyMeter::within(folder.path()).unwrap_err();
        assert!(error.to_string().contains("no battery"), "{error}");
        let files = [
            ("type", "Battery"),
            ("status", "Discharging"),
            ("current_now", "-500000"),
            ("voltage_now", "4000000"),
        ];
        write(folder.path(), "power_supply/battery", &files);
        write(folder.path(), "power_supply/ac", &[("type", "Mains")]);
        let meter = EnergyMeter::within(folder.path()).unwrap();
        assert_eq!(meter.name(), "battery");
        let start = Instant::now();
        let (seconds, joules) = meter.measure(|| {
            thread::sleep(Duration::from_millis(5));
            start.elapsed().as_secs_f64()
        });
        // 2 W for as long as it ran.
        let joules = joules.unwrap();
        assert!(joules >= 2.0 * 0.005 && joules <= 2.0 * (seconds + 60.0), "{joules}");
        write(folder.path(), "power_supply/battery", &[("status", "Charging")]);
        assert_eq!(meter.measure(|| ()).1, None);
        assert!(EnergyMeter::within(folder.path()).is_err());
    }
}
