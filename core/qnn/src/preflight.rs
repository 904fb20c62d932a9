//! Explains, before a context is loaded, why it will not load.

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::BACKEND_HTP as HTP;

use super::device::Platform;
use super::info::BinaryInfo;
use super::library::ApiVersion;

/// Core interface of the first library that writes and reads blobs of version 4.
const BLOB_4_SINCE: ApiVersion = ApiVersion { major: 2, minor: 38, patch: 0 };
/// What one process domain of the NPU was seen to hold.
const DOMAIN_BYTES: u64 = 3_300_000_000;

/// What a binary is going to meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The device's architecture, when known; `None` accepts every binary.
    pub arch: Option<u32>,
    /// The library emulates the NPU.
    pub emulated: bool,
    /// Core interface of the library; `None` when only the metadata is looked at.
    pub core: Option<ApiVersion>,
    /// The device's tightly coupled memory in MB, when known; `None` accepts every binary.
    pub vtcm_mb: Option<u64>,
}

impl Destination {
    /// A device as the library describes it, with the architecture replaced by `arch` if given.
    ///
    /// An emulator always describes the same old chip and executes binaries of every
    /// architecture: its own word is not taken.
    pub fn new(platform: &Platform, arch: Option<u32>, core: ApiVersion) -> Self {
        let own = if platform.emulated { None } else { platform.arch };
        let vtcm_mb = if platform.emulated { None } else { platform.vtcm_mb };
        Self { arch: arch.or(own), emulated: platform.emulated, core: Some(core), vtcm_mb }
    }
}

/// Checks that the binary called `name` can run at `destination`.
///
/// # Errors
/// When it cannot: with what the binary needs, what the device has, and a fix.
pub fn preflight(name: &str, info: &BinaryInfo, destination: &Destination) -> Result<()> {
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
    if let (Some(wanted), Some(found)) = (destination.arch, info.dsp_arch)
        && wanted != found
    {
        return refuse(
            format!("compiled for Hexagon v{found}, this device has v{wanted}"),
            &format!("use the bundle's v{wanted} folder, or forge it for v{wanted}"),
        );
    }
    let needed = info.graphs.iter().filter_map(|graph| vtcm_mb(graph.figures?.vtcm?)).max();
    if let (Some(has), Some(needs)) = (destination.vtcm_mb, needed)
        && needs > has
    {
        return refuse(
            format!("compiled for {needs} MB of tightly coupled memory, this device has {has} MB"),
            "it is for another chip of the same architecture: forge the bundle for this one",
        );
    }
    if destination.emulated && info.shares_weights() {
        return refuse(
            "its graphs share weights, which the library on x86-64 cannot load".to_owned(),
            "run it on a device, or forge it without weight sharing",
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
        if info.core_version > core {
            tracing::warn!(
                "{name}: made by a newer QAIRT (core interface {}) than the library ({core})",
                info.core_version
            );
        }
    }
    if !destination.emulated && info.file_bytes > DOMAIN_BYTES {
        tracing::warn!(
            "{name}: {} bytes; one process domain of the NPU holds about {DOMAIN_BYTES}",
            info.file_bytes
        );
    }
    Ok(())
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

    fn platform(emulated: bool) -> Platform {
        Platform { arch: Some(68), soc: Some(30), vtcm_mb: None, cores: 1, emulated }
    }

    #[test]
    fn an_emulator_takes_every_architecture_by_default() {
        let any = Destination::new(&platform(true), None, V2_40);
        preflight("a.bin", &info(), &any).unwrap();
        let destination = Destination::new(&platform(true), Some(75), V2_40);
        let error = preflight("a.bin", &info(), &destination).unwrap_err();
        assert_eq!(error.message(), "a.bin: compiled for Hexagon v81, this device has v75");
    }

    #[test]
    fn a_device_takes_its_own_architecture_only() {
        let device = Destination::new(&platform(false), None, V2_40);
        assert!(preflight("a.bin", &info(), &device).is_err());
        let mut own = info();
        own.dsp_arch = Some(68);
        preflight("a.bin", &own, &device).unwrap();
    }

    #[test]
    fn a_device_refuses_another_architecture_with_what_to_take() {
        for (binary, device) in [(79, 81), (81, 79)] {
            let made = BinaryInfo { dsp_arch: Some(binary), ..info() };
            let platform = Platform { arch: Some(device), ..platform(false) };
            let place = Destination::new(&platform, None, V2_40);
            let error = preflight("a.bin", &made, &place).unwrap_err();
            let expected =
                format!("a.bin: compiled for Hexagon v{binary}, this device has v{device}");
            assert_eq!(error.message(), expected);
            assert!(error.hint_text().unwrap().contains(&format!("v{device} folder")), "{error}");
        }
    }

    #[test]
    fn a_binary_for_a_chip_with_more_memory_is_refused() {
        let mut made = info();
        made.graphs[0].figures = Some(GraphFigures { vtcm: Some(8 << 20), ..Default::default() });
        let device = |mb| {
            let platform = Platform { arch: Some(81), vtcm_mb: Some(mb), ..platform(false) };
            preflight("a.bin", &made, &Destination::new(&platform, None, V2_40))
        };
        device(8).unwrap();
        let error = device(4).unwrap_err();
        assert!(error.message().contains("8 MB of tightly coupled memory"), "{error}");
        assert!(error.message().ends_with("has 4 MB"), "{error}");
    }

    #[test]
    fn shared_weights_need_a_device() {
        let mut shared = info();
        shared.graphs[0].figures =
            Some(GraphFigures { shared_weight_bytes: Some(4096), ..GraphFigures::default() });
        let emulator = Destination { arch: None, emulated: true, core: None, vtcm_mb: None };
        let error = preflight("a.bin", &shared, &emulator).unwrap_err();
        assert!(error.message().contains("share weights"), "{error}");
        preflight("a.bin", &shared, &Destination { emulated: false, ..emulator }).unwrap();
    }

    #[test]
    fn a_newer_blob_is_refused_with_the_release_that_made_it() {
        let old = ApiVersion { major: 2, minor: 37, patch: 0 };
        let library = Destination { arch: None, emulated: true, core: Some(old), vtcm_mb: None };
        let error = preflight("a.bin", &info(), &library).unwrap_err();
        assert!(error.message().contains("QAIRT 2.51"), "{error}");
    }

    #[test]
    fn another_backend_and_an_empty_context_are_refused() {
        let any = Destination { arch: None, emulated: true, core: None, vtcm_mb: None };
        let gpu = BinaryInfo { backend_id: 4, ..info() };
        assert!(preflight("a.bin", &gpu, &any).is_err());
        let empty = BinaryInfo { graphs: vec![], ..info() };
        assert!(preflight("a.bin", &empty, &any).is_err());
    }
}
