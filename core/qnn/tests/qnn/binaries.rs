//! Metadata of binaries, and files that are not what they claim to be.

use qhx_base::{Error, ErrorKind};
use qhx_exec::backend::Backend as _;
use qhx_fake_device::{Chip, Control, Plan};
use qhx_qnn::compose::GraphConfig;
use qhx_qnn::{BinaryInfo, Destination, MemoryMode, QnnOptions, SystemLibrary, Target, preflight};
use qhx_types::DType;

use crate::*;

fn open(library: &Library, options: QnnOptions, bytes: &[u8]) -> Error {
    let (_folder, source) = file(bytes);
    let error = backend(library, options).open_context(&source).err().expect("is refused");
    let path = source.binary.unwrap().display().to_string();
    assert!(error.message().contains(&path), "names the file: {error}");
    assert!(error.hint_text().is_some(), "has a fix: {error}");
    error
}

#[tier(qnn)]
fn metadata_declares_what_was_composed() {
    let library = opened();
    for target in Target::ALL {
        let binary = linear_binary(&library, target, 20);
        let info = BinaryInfo::read(library.system(), "a.bin", &binary).unwrap();
        assert_eq!(info.dsp_arch, Some(target.arch));
        assert_eq!(info.soc_model, Some(target.soc));
        assert_eq!(info.file_bytes, binary.len() as u64);
        assert_eq!(info.core_version, library.core_version());
        assert!(library.build_id().contains(&info.qairt().unwrap()), "{info:?}");
        assert!(!info.shares_weights());
        let [graph] = &info.graphs[..] else { panic!("one graph: {info:?}") };
        assert_eq!(graph.name, "linear");
        let described = graph.info().unwrap();
        assert_eq!(described.inputs[0].to_string(), "x f16[1, 64]");
        assert_eq!(described.outputs[0].to_string(), "y f16[1, 48]");
        assert_ne!(graph.inputs[0].id, graph.outputs[0].id);
        let figures = graph.figures.unwrap();
        assert!(figures.const_bytes.unwrap() >= (2 * N * K) as u64, "{figures:?}");
        assert!(figures.vtcm.unwrap() > 0);
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!(json["graphs"][0]["inputs"][0]["dtype"], "f16");
    }
}

#[tier(qnn)]
fn metadata_needs_the_system_library_only() {
    let library = opened();
    let system = SystemLibrary::open(library.system().path()).unwrap();
    let binary = linear_binary(&library, Target::V75, 21);
    let info = BinaryInfo::read(&system, "a.bin", &binary).unwrap();
    preflight("a.bin", &info, &Destination::of(Target { vtcm_mb: None, ..Target::V75 })).unwrap();
}

#[tier(qnn)]
fn the_encoding_of_inputs_and_outputs_is_read() {
    let library = opened();
    let quantization = Quantization::PerTensor { scale: 0.000_5, offset: -32768 };
    let binary = binary(&library, Target::V81, "u16", |graph| {
        let spec = TensorSpec::input("x", DType::UFixed16, &[1, K]);
        let x = graph.tensor(spec.quantized(quantization.clone())).unwrap();
        let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, K])).unwrap();
        graph.node("y", "Dequantize", &[], &[x], &[y]).unwrap();
    });
    let info = BinaryInfo::read(library.system(), "a.bin", &binary).unwrap();
    assert_eq!(info.graphs[0].inputs[0].dtype, Some(DType::UFixed16));
    assert_eq!(info.graphs[0].inputs[0].quantization, quantization);
    let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
    let quantised: Vec<u16> = (0..K as u16).map(|i| 32768 + 100 * i).collect();
    let bytes: Vec<u8> = quantised.iter().flat_map(|q| q.to_le_bytes()).collect();
    let expected: Vec<f64> =
        quantised.iter().map(|&q| (f64::from(q) - 32768.0) * 0.000_5).collect();
    assert!(error(&read_f16s(&session.run(0, &bytes)), &expected) < 1e-3);
}

#[tier(qnn)]
fn an_empty_file_is_called_empty() {
    let library = opened();
    let error = open(&library, QnnOptions::default(), &[]);
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("the file is empty"), "{error}");
}

#[tier(qnn)]
fn a_truncated_file_is_refused_in_one_sentence() {
    let library = opened();
    let whole = linear_binary(&library, Target::V81, 22);
    let len = whole.len();
    let noise: Vec<u8> =
        numbers(23, 5000).iter().map(|v| (v.to_bits() >> 20 & 0xff) as u8).collect();
    let mut longer = whole.clone();
    longer.extend_from_slice(&[0; 64]);
    let cases: [(&str, &[u8]); 9] = [
        ("16 bytes", &whole[..16]),
        ("100 bytes", &whole[..100]),
        ("4 KiB", &whole[..4096]),
        ("half", &whole[..len / 2]),
        ("all but one byte", &whole[..len - 1]),
        ("more than all", &longer),
        ("zeros", &[0; 4096]),
        ("noise", &noise),
        ("a pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"),
    ];
    for (case, bytes) in cases {
        let error = open(&library, QnnOptions::default(), bytes);
        assert_eq!(error.kind(), ErrorKind::Artifact, "{case}: {error}");
        assert!(error.code().is_some(), "{case}: {error}");
        assert!(!error.message().contains('\n'), "{case}: {error}");
    }
}

#[tier(qnn)]
fn flipped_bytes_never_end_the_process() {
    let library = opened();
    let whole = linear_binary(&library, Target::V81, 24);
    let backend = backend(&library, QnnOptions::default());
    let mut refused = 0;
    for round in 0..24u32 {
        let mut bytes = whole.clone();
        let reach = if round % 2 == 0 { 4096 } else { 65536.min(whole.len()) };
        for v in numbers(200 + round, 8) {
            bytes[((v + 0.5) * reach as f64) as usize] ^= 0x55;
        }
        let (_folder, source) = file(&bytes);
        if let Err(error) = backend.open_context(&source) {
            assert!(matches!(error.kind(), ErrorKind::Artifact | ErrorKind::Context), "{error}");
            refused += 1;
        }
    }
    assert!(refused >= 6, "only {refused} of 24 were refused");
    // The backend still works.
    let mut session = Session::open(backend, &whole);
    let (input, x) = f16s(&numbers(25, K));
    assert!(error(&read_f16s(&session.run(0, &input)), &product(&x, &weight(24).1)) < 2e-3);
}

#[tier(qnn)]
fn another_architecture_is_refused_before_loading() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 26);
    let options = QnnOptions { device_arch: Some(75), ..QnnOptions::default() };
    let error = open(&library, options, &binary);
    assert_eq!(error.kind(), ErrorKind::Context);
    assert!(error.message().ends_with("compiled for Hexagon v81, this device has v75"), "{error}");
    let same = QnnOptions { device_arch: Some(81), ..QnnOptions::default() };
    Session::open(backend(&library, same), &binary);
}

#[tier(qnn)]
fn a_missing_file_is_named() {
    let library = opened();
    let (folder, source) = file(b"x");
    drop(folder);
    let error = backend(&library, QnnOptions::default()).open_context(&source).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("part.bin"), "{error}");
}

#[tier(qnn)]
fn weights_shared_by_graphs_are_refused_on_the_emulator() {
    let library = opened();
    let configs = [qhx_qnn::ContextConfig::WeightSharing(true)];
    let mut context = Composer::new(&library, Target::V81, &configs).unwrap();
    let (bytes, _) = f16s(&numbers(27, 512 * 512));
    for (name, rows) in [("prefill", 16), ("decode", 1)] {
        let mut graph = context.graph(name, &[]).unwrap();
        let x = graph.tensor(TensorSpec::input("x", DType::F16, &[rows, 512])).unwrap();
        let spec = TensorSpec::constant("w", DType::F16, &[512, 512], &bytes);
        let w = graph.tensor(spec).unwrap();
        let y = graph.tensor(TensorSpec::output("y", DType::F16, &[rows, 512])).unwrap();
        graph.node("y", "FullyConnected", &[], &[x, w], &[y]).unwrap();
        graph.finalize().unwrap();
    }
    let binary = context.binary().unwrap();
    drop(context);
    let info = BinaryInfo::read(library.system(), "a.bin", &binary).unwrap();
    assert!(info.shares_weights(), "{info:?}");
    if qhx_qnn::Platform::is_emulated() {
        let error = open(&library, QnnOptions::default(), &binary);
        assert!(error.message().contains("share weights"), "{error}");
    }
}

/// Opens a bundle of two binaries for `target` on a stand-in device with the chip, each of them twice, and returns the
/// warnings, or the error.
fn opened_on(
    (library, control): &(Library, Control),
    binary: &[u8],
    chip: Chip,
) -> (qhx_base::Result<()>, Vec<String>) {
    control.set(&Plan { chip: Some(chip), ..Plan::default() }).unwrap();
    let options = QnnOptions {
        emulated: Some(false),
        memory: MemoryMode::Raw,
        open_threads: Some(1),
        share_spill_fill: Some(false),
        ..QnnOptions::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let sources = ["a", "b"].map(|key| {
        let path = folder.path().join(key);
        std::fs::write(&path, binary).unwrap();
        ContextSource { key: key.to_owned(), binary: Some(path), ..ContextSource::default() }
    });
    let backend = between::backend_over(control, library, options);
    let (result, warnings) = memory::listen(|| {
        drop(backend.open_contexts(&sources)?);
        backend.open_contexts(&sources).map(drop)
    });
    let own = format!("{}: ", folder.path().display());
    drop(backend);
    control.closed(&format!("{chip:?}"));
    let warnings = warnings.iter().map(|line| line.replace(&own, "")).collect();
    (result, warnings)
}

#[tier(qnn)]
fn a_device_opens_warns_or_refuses_by_architecture() {
    let fake = between::fake();
    for made in Target::ALL {
        let binary = linear_binary(&fake.0, made, 40);
        for device in Target::ALL {
            // As much as the binary uses, so that the architecture alone decides.
            let info = BinaryInfo::read(fake.0.system(), "a", &binary).unwrap();
            let chip =
                Chip { arch: device.arch, soc: device.soc, vtcm_mb: info.vtcm_mb().unwrap() };
            let (result, warnings) = opened_on(&fake, &binary, chip);
            let label = format!("{made} on {device}: {result:?}, {warnings:?}");
            let (made, has) = (made.arch, device.arch);
            if made > has || (made < 73 && has >= 73) {
                let error = result.unwrap_err();
                assert!(
                    error.message().ends_with(&format!(
                        "compiled for Hexagon v{made}, this device has v{has}"
                    )),
                    "{label}"
                );
                assert!(error.hint_text().unwrap().contains(&format!("v{has} folder")), "{label}");
                assert!(warnings.is_empty(), "{label}");
                continue;
            }
            result.unwrap_or_else(|_| panic!("{label}"));
            let expected = format!(
                "made for v{made}, runs at less than full speed on this v{has}; take the bundle's v{has} folder, or \
                 forge it for v{has}"
            );
            assert_eq!(warnings, if made == has { vec![] } else { vec![expected] }, "{label}");
        }
    }
}

#[tier(qnn)]
fn a_device_with_less_memory_refuses_what_needs_more() {
    let fake = between::fake();
    let (library, small) = (&fake.0, Target::named("SSG2115P").unwrap());
    let chip = |vtcm_mb| Chip { arch: 73, soc: small.soc, vtcm_mb };
    let configs = [GraphConfig::VtcmMb(2)];
    let binary = composed_linear(library, small, &configs, 41).binary().unwrap();
    let (result, warnings) = opened_on(&fake, &binary, chip(2));
    assert!(result.is_ok() && warnings.is_empty(), "{result:?} {warnings:?}");
    let (result, warnings) = opened_on(&fake, &binary, chip(8));
    assert!(result.is_ok() && warnings.len() == 1, "{result:?} {warnings:?}");
    assert!(
        warnings[0].starts_with("declares 2 of the 8 MB of tightly coupled memory; "),
        "{warnings:?}"
    );
    let (result, warnings) = opened_on(&fake, &binary, chip(1));
    let error = result.unwrap_err();
    assert!(error.message().ends_with("this device has 1 MB") && warnings.is_empty(), "{error}");
}
