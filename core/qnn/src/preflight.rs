//! Explains, before a context is loaded, why it will not load.

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::BACKEND_HTP as HTP;

use super::device::Platform;
use super::info::BinaryInfo;
use super::library::ApiVersion;
use super::target::Target;

/// Core interface of the first library that writes and reads blobs of version 4.
const BLOB_4_SINCE: ApiVersion = ApiVersion { major: 2, minor: 38, patch: 0 };
/// Bytes that one process domain of the NPU was seen to hold.
const DOMAIN_BYTES: u64 = 3_300_000_000;

/// Device and library that a binary is going to meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The device's architecture, when known; `None` accepts every binary.
    pub arch: Option<u32>,
    /// The library emulates the NPU.
    pub emulated: bool,
    /// Core interface of the library; `None` when only the metadata is looked at.
    pub core: Option<ApiVersion>,
    /// HTP interface of the library; `None` accepts every binary.
    pub htp: Option<ApiVersion>,
    /// The device's tightly coupled memory in MB, when known; `None` accepts every binary.
    pub vtcm_mb: Option<u64>,
}

impl Destination {
    /// A device as the library describes it, with the architecture replaced by `arch` if given.
    ///
    /// An emulator always describes the same old chip and executes binaries of every
    /// architecture: its own word is not taken.
    pub fn new(platform: &Platform, arch: Option<u32>, core: ApiVersion, htp: ApiVersion) -> Self {
        let own = if platform.emulated { None } else { platform.arch };
        let vtcm_mb = if platform.emulated { None } else { platform.vtcm_mb };
        Self {
            arch: arch.or(own),
            emulated: platform.emulated,
            core: Some(core),
            htp: Some(htp),
            vtcm_mb,
        }
    }

    /// A device with the chip of a target, whatever its libraries.
    pub fn of(target: Target) -> Self {
        Self {
            arch: Some(target.arch),
            emulated: false,
            core: None,
            htp: None,
            vtcm_mb: target.vtcm_mb.map(u64::from),
        }
    }
}

/// Verdict on a binary for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It was compiled for such a device, or nothing is known that says otherwise.
    Optimal,
    /// It runs, at less than full speed.
    Supported {
        /// Target that the binary was compiled for, and the device's.
        reason: String,
        /// Hint at a binary that would run at full speed.
        hint: String,
    },
    /// It does not run.
    Refused {
        /// Needs of the binary, and what the device has.
        reason: String,
        /// Hint at a binary that would run.
        hint: String,
    },
}

/// The architecture from which on devices run no binaries of older ones.
const SPLIT: u32 = 73;

/// True if a device of the architecture `device` runs binaries for the architecture `made`.
pub const fn runs_on(made: u32, device: u32) -> bool {
    made <= device && (made >= SPLIT || device < SPLIT)
}

/// Verdict on a binary for a device, by Qualcomm's own rule: a device refuses binaries of newer architectures and HTP
/// interfaces and those that need more tightly coupled memory than it has, and from v73 on those of architectures
/// before v73. Other binaries run; those for another architecture or memory size would be faster if compiled for
/// this device.
pub fn verdict(binary: &BinaryInfo, device: &Destination) -> Verdict {
    let refused = |reason, hint: &str| Verdict::Refused { reason, hint: hint.to_owned() };
    let (made, has) = (binary.dsp_arch, device.arch);
    if let (Some(made), Some(has)) = (made, has)
        && !runs_on(made, has)
    {
        return refused(
            format!("compiled for Hexagon v{made}, this device has v{has}"),
            &format!("use the bundle's v{has} folder, or forge it for v{has}"),
        );
    }
    let needed = binary.vtcm_mb();
    if let (Some(needs), Some(has)) = (needed, device.vtcm_mb)
        && needs > has
    {
        return refused(
            format!("compiled for {needs} MB of tightly coupled memory, this device has {has} MB"),
            "it is for another chip: forge the bundle for this one, see --target",
        );
    }
    let interface = |version: ApiVersion| (version.major, version.minor);
    if let Some(library) = device.htp
        && interface(binary.backend_version) > interface(library)
    {
        return refused(
            format!(
                "made by QAIRT {} (HTP interface {}), newer than the library ({library})",
                binary.qairt().unwrap_or_else(|| "unknown".to_owned()),
                binary.backend_version
            ),
            "use newer QNN libraries, or forge the bundle with those of the device",
        );
    }
    let (mut reasons, mut folder) = (Vec::new(), None);
    if let (Some(made), Some(has)) = (made, has)
        && made != has
    {
        reasons.push(format!("made for v{made}, runs at less than full speed on this v{has}"));
        folder = Some(has);
    }
    if let (Some(needs), Some(has)) = (needed, device.vtcm_mb)
        && needs != has
    {
        reasons.push(format!("declares {needs} of the {has} MB of tightly coupled memory"));
    }
    if reasons.is_empty() {
        return Verdict::Optimal;
    }
    let hint = match folder {
        Some(arch) => format!("take the bundle's v{arch} folder, or forge it for v{arch}"),
        None => "forge the bundle for this chip, see --target".to_owned(),
    };
    Verdict::Supported { reason: reasons.join(", "), hint }
}

/// Checks that the binary called `name` can run at `destination`, and returns how.
///
/// # Errors
/// When it cannot: with what the binary needs, what the device has, and a fix.
pub fn preflight(name: &str, info: &BinaryInfo, destination: &Destination) -> Result<Verdict> {
    let refuse = |message: String, hint: &str| {
        Err(Error::new(ErrorKind::Context, format!("{name}: {message}")).hint(hint))
    };
    if info.backend_id != HTP {
        return refuse(
            format!("made for QNN backend {}, this is the HTP backend ({HTP})", info.backend_id),
            "take the bundle that is built for the NPU",
        );
    }
    if info.graphs.is_empty() {
        return refuse("the context holds no graph".to_owned(), "build the bundle again");
    }
    if destination.emulated && info.shares_weights() {
        return refuse(
            "made for a device: its graphs share weights, which the emulator on x86-64 cannot load"
                .to_owned(),
            "`qhx forge CHECKPOINT --for-emulator` makes a bundle for the emulator",
        );
    }
    if let Some(core) = destination.core {
        let newest = if core >= BLOB_4_SINCE { u32::MAX } else { 3 };
        if info.blob_version.major > newest {
            return refuse(
                format!(
                    "blob version {} of QAIRT {}, the library (core interface {core}) reads up to {newest}.x",
                    info.blob_version,
                    info.qairt().unwrap_or_else(|| "unknown".to_owned()),
                ),
                "use the libraries of QAIRT 2.49 or newer",
            );
        }
    }
    let verdict = verdict(info, destination);
    if let Verdict::Refused { reason, hint } = verdict {
        return refuse(reason, &hint);
    }
    if !destination.emulated && info.file_bytes > DOMAIN_BYTES {
        tracing::warn!(
            "{name}: {} bytes; one process domain of the NPU holds about {DOMAIN_BYTES}",
            info.file_bytes
        );
    }
    Ok(verdict)
}

impl BinaryInfo {
    /// Tightly coupled memory in MB that its graphs use at most.
    pub fn vtcm_mb(&self) -> Option<u64> {
        self.graphs.iter().filter_map(|graph| vtcm_mb(graph.figures?.vtcm?)).max()
    }
}

/// Tightly coupled memory in MB, rounded up. Libraries write a small number of MB, or bytes.
fn vtcm_mb(figure: u32) -> Option<u64> {
    let figure = u64::from(figure);
    Some(if figure < 1 << 10 { figure } else { figure.div_ceil(1 << 20) }).filter(|&mb| mb > 0)
}

#[cfg(test)]
mod tests {
    use super::super::info::{BinaryGraph, GraphFigures};
    use super::*;

    const V2_40: ApiVersion = ApiVersion { major: 2, minor: 40, patch: 0 };

    fn info() -> BinaryInfo {
        BinaryInfo {
            file_bytes: 1000,
            backend_id: HTP,
            build_id: "v2.51.0.1".to_owned(),
            core_version: V2_40,
            backend_version: ApiVersion { major: 5, minor: 51, patch: 0 },
            blob_version: ApiVersion { major: 4, minor: 0, patch: 6 },
            blob_bytes: 900,
            dsp_arch: Some(81),
            soc_model: Some(87),
            graphs: vec![BinaryGraph {
                name: "g".to_owned(),
                inputs: vec![],
                outputs: vec![],
                figures: Some(GraphFigures::default()),
            }],
        }
    }

    const ANYWHERE: Destination =
        Destination { arch: None, emulated: true, core: None, htp: None, vtcm_mb: None };
    const V5_51: ApiVersion = ApiVersion { major: 5, minor: 51, patch: 0 };

    fn platform(emulated: bool) -> Platform {
        Platform { arch: Some(68), soc: Some(30), vtcm_mb: None, cores: 1, emulated }
    }

    fn place(platform: &Platform, arch: Option<u32>) -> Destination {
        Destination::new(platform, arch, V2_40, V5_51)
    }

    /// A device with this much tightly coupled memory.
    fn device(arch: u32, vtcm_mb: Option<u64>) -> Destination {
        place(&Platform { arch: Some(arch), vtcm_mb, ..platform(false) }, None)
    }

    fn made(arch: u32, vtcm: Option<u32>) -> BinaryInfo {
        let mut made = BinaryInfo { dsp_arch: Some(arch), ..info() };
        made.graphs[0].figures = Some(GraphFigures { vtcm, ..Default::default() });
        made
    }

    /// `=` at full speed, `+` slower, `-` not.
    fn sign(verdict: &Verdict) -> char {
        match verdict {
            Verdict::Optimal => '=',
            Verdict::Supported { .. } => '+',
            Verdict::Refused { .. } => '-',
        }
    }

    #[test]
    fn binaries_run_on_the_devices_that_qualcomms_rule_names() {
        const ARCHS: [u32; 6] = [68, 69, 73, 75, 79, 81];
        // A line for each binary, a column for each device.
        let expected = [
            (68, "=+----"),
            (69, "-=----"),
            (73, "--=+++"),
            (75, "---=++"),
            (79, "----=+"),
            (81, "-----="),
        ];
        for (binary, row) in expected {
            let found: String = ARCHS
                .map(|has| sign(&verdict(&made(binary, None), &device(has, None))))
                .iter()
                .collect();
            assert_eq!(found, row, "made for v{binary}");
            for (has, expected) in ARCHS.into_iter().zip(row.chars()) {
                let opened = preflight("a.bin", &made(binary, None), &device(has, None));
                assert_eq!(opened.is_err(), expected == '-', "v{binary} on v{has}: {opened:?}");
            }
        }
    }

    #[test]
    fn a_slower_binary_says_what_it_costs_and_what_to_take() {
        let Verdict::Supported { reason, hint } = verdict(&made(73, None), &device(81, None))
        else {
            panic!("v73 runs on v81");
        };
        assert_eq!(reason, "made for v73, runs at less than full speed on this v81");
        assert_eq!(hint, "take the bundle's v81 folder, or forge it for v81");
    }

    #[test]
    fn memory_decides_as_the_architecture_does() {
        // MB of the binary, of the device.
        for (needs, has, expected) in
            [(8, 8, '='), (4, 8, '+'), (8, 4, '-'), (2, 2, '='), (4, 2, '-'), (0, 2, '=')]
        {
            for bytes in [needs, needs << 20] {
                let found = verdict(&made(81, Some(bytes)), &device(81, Some(has)));
                assert_eq!(sign(&found), expected, "{needs} of {has} MB: {found:?}");
            }
        }
        let both = verdict(&made(73, Some(4)), &device(79, Some(8)));
        let Verdict::Supported { reason, .. } = both else { panic!("{both:?}") };
        assert!(
            reason.starts_with("made for v73, ") && reason.contains("4 of the 8 MB"),
            "{reason}"
        );
        let unknown = verdict(&made(81, Some(8)), &device(81, None));
        assert_eq!(unknown, Verdict::Optimal);
    }

    #[test]
    fn a_binary_of_a_newer_interface_is_refused() {
        let library =
            |minor| Destination { htp: Some(ApiVersion { minor, ..V5_51 }), ..device(81, None) };
        assert_eq!(verdict(&made(81, None), &library(51)), Verdict::Optimal);
        assert_eq!(verdict(&made(81, None), &library(52)), Verdict::Optimal);
        let Verdict::Refused { reason, hint } = verdict(&made(81, None), &library(50)) else {
            panic!("5.51 is newer than 5.50");
        };
        assert!(reason.contains("QAIRT 2.51 (HTP interface 5.51.0)"), "{reason}");
        assert!(reason.contains("5.50.0") && hint.contains("newer QNN libraries"), "{reason}");
    }

    #[test]
    fn a_target_says_what_runs_on_its_chip_without_a_device() {
        let on = |name: &str| {
            let target = Target::named(name).unwrap();
            sign(&verdict(&made(73, Some(8)), &Destination::of(target)))
        };
        assert_eq!(["x-elite", "8s-gen-3", "v81", "v69"].map(on), ['=', '-', '+', '-']);
    }

    #[test]
    fn an_emulator_takes_every_architecture_by_default() {
        let any = place(&platform(true), None);
        assert_eq!(preflight("a.bin", &info(), &any).unwrap(), Verdict::Optimal);
        let error = preflight("a.bin", &info(), &place(&platform(true), Some(75))).unwrap_err();
        assert_eq!(error.message(), "a.bin: compiled for Hexagon v81, this device has v75");
        assert!(error.hint_text().unwrap().contains("v75 folder"), "{error}");
    }

    #[test]
    fn shared_weights_need_a_device() {
        let mut shared = info();
        shared.graphs[0].figures =
            Some(GraphFigures { shared_weight_bytes: Some(4096), ..GraphFigures::default() });
        let emulator = ANYWHERE;
        let error = preflight("a.bin", &shared, &emulator).unwrap_err();
        assert!(error.message().contains("made for a device"), "{error}");
        assert!(error.hint_text().unwrap().contains("--for-emulator"), "{error}");
        preflight("a.bin", &shared, &Destination { emulated: false, ..emulator }).unwrap();
    }

    #[test]
    fn a_newer_blob_is_refused_with_the_release_that_made_it() {
        let old = ApiVersion { major: 2, minor: 37, patch: 0 };
        let library = Destination { core: Some(old), ..ANYWHERE };
        let error = preflight("a.bin", &info(), &library).unwrap_err();
        assert!(error.message().contains("QAIRT 2.51"), "{error}");
    }

    #[test]
    fn another_backend_and_an_empty_context_are_refused() {
        let any = ANYWHERE;
        let gpu = BinaryInfo { backend_id: 4, ..info() };
        assert!(preflight("a.bin", &gpu, &any).is_err());
        let empty = BinaryInfo { graphs: vec![], ..info() };
        assert!(preflight("a.bin", &empty, &any).is_err());
    }
}
