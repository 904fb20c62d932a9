//! Opening libraries.

use std::path::Path;

use qhx_core::ErrorKind;
use qhx_core::qnn::{Device, LogLevel, SystemLibrary, Target};

use crate::*;

#[test]
fn the_libraries_do_not_pass_for_one_another() {
    let Some(library) = tier() else { return };
    let error = SystemLibrary::open(library.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("QnnSystemInterface_getProviders"), "{error}");
    let error = Library::open(library.system().path(), Some(library.system().path())).unwrap_err();
    assert!(error.message().contains("QnnInterface_getProviders"), "{error}");
}

#[test]
fn a_missing_library_is_named() {
    let Some(library) = tier() else { return };
    let error = Library::open(Path::new("/nowhere/libQnnHtp.so"), Some(library.system().path()))
        .unwrap_err();
    assert!(error.message().starts_with("/nowhere/libQnnHtp.so"), "{error}");
    let error = Library::open(library.path(), Some(Path::new("/nowhere/sys.so"))).unwrap_err();
    assert!(error.message().starts_with("/nowhere/sys.so"), "{error}");
}

#[test]
fn a_device_for_an_unknown_architecture_is_refused() {
    let Some(library) = tier() else { return };
    let unknown = Target { arch: 12, soc: 9999 };
    let error = Device::open(&library, LogLevel::Error, Some(unknown)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("for v12"), "{error}");
    assert!(error.code().is_some());
}

#[test]
fn the_platform_is_described() {
    let Some(library) = tier() else { return };
    let platform = Device::open(&library, LogLevel::Error, None).unwrap().platform().unwrap();
    assert!(platform.arch.is_some_and(|arch| (68..200).contains(&arch)), "{platform:?}");
    assert!(platform.cores > 0 && platform.soc.is_some());
}

#[test]
fn the_library_has_words_for_its_codes() {
    let Some(library) = tier() else { return };
    let words = library.message(qhx_core::qnn::codes::Code(5005)).unwrap();
    assert!(!words.is_empty());
}
