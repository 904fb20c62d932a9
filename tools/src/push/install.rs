//! Copying to a phone, which may run full, restart or lose its connection meanwhile.

use std::collections::HashMap;
use std::time::Instant;

use qhx_base::{Error, ErrorKind, Result, error};
use serde::Serialize;

use super::PushEvent;
use super::adb::{Device, Fault, is_full, quoted};
use super::files::{Files, Item, NAME};

/// Times that a phone may disconnect while files are copied.
const MAX_LOST: u32 = 5;

/// Files that were copied.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Install {
    /// Files that belong there.
    pub files: usize,
    /// Files that were not there, or were others.
    pub copied: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// Time that it took.
    pub ms: f64,
    /// Times that the phone disconnected and came back.
    pub lost: u32,
}

/// Copies the files that differ from those `there`, and compares what has arrived. Where the phone disconnects, it is
/// waited for, and what has arrived until then is not copied again. `done` has what was done until an error.
pub(super) fn install(
    device: &Device,
    folder: &str,
    files: &Files,
    there: HashMap<String, String>,
    done: &mut Install,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) -> Result<()> {
    let start = Instant::now();
    done.files = files.items.len();
    let mut there = Some(there);
    loop {
        let listed =
            there.take().map_or_else(|| device.hashes(folder, &files.below(), files.bytes()), Ok);
        let copied = listed.and_then(|there| copy(device, folder, files, &there, done, on_event));
        done.ms = start.elapsed().as_secs_f64() * 1e3;
        match copied {
            Ok(()) => return Ok(()),
            Err(Fault::Gone(error)) if done.lost < MAX_LOST => {
                done.lost += 1;
                on_event(PushEvent::Lost(&error));
                device.wait()?;
                on_event(PushEvent::Back);
            }
            Err(fault) => return Err(fault.into()),
        }
    }
}

/// Copies all that differs.
fn copy(
    device: &Device,
    folder: &str,
    files: &Files,
    there: &HashMap<String, String>,
    done: &mut Install,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) -> Result<(), Fault> {
    let path = |item: &Item| format!("{folder}/{}", item.to);
    let changed: Vec<_> =
        files.items.iter().filter(|item| there.get(&item.to) != Some(&item.hash)).collect();
    let mut folders: Vec<_> =
        changed.iter().filter_map(|item| Some(quoted(path(item).rsplit_once('/')?.0))).collect();
    folders.dedup();
    if folders.is_empty() {
        return Ok(());
    }
    device.shell(&format!("mkdir -p {}", folders.join(" ")))?;
    let mut left: u64 = changed.iter().map(|item| item.bytes).sum();
    for (index, item) in changed.iter().enumerate() {
        on_event(PushEvent::Copy {
            index,
            count: changed.len(),
            path: &item.to,
            bytes: item.bytes,
        });
        device.push(&item.from, &path(item), item.bytes).map_err(|fault| match fault {
            Fault::Other(error) if is_full(error.message()) => Fault::Other(full(error, left)),
            fault => fault,
        })?;
        left -= item.bytes;
        done.copied += 1;
        done.bytes += item.bytes;
    }
    device.shell(&format!("chmod 755 {}", quoted(&format!("{folder}/{NAME}"))))?;
    let there = device.hashes(folder, &files.below(), files.bytes())?;
    match changed.iter().find(|item| there.get(&item.to) != Some(&item.hash)) {
        None => Ok(()),
        Some(item) => {
            let found = there.get(&item.to).map_or("nothing", String::as_str);
            let expected = &item.hash;
            let error =
                error!(Io, "{}: arrived as {found}, expected sha256 {expected}", path(item));
            Err(Fault::Other(
                error.hint("the connection may be bad, or the device full: try again"),
            ))
        }
    }
}

fn full(error: Error, bytes: u64) -> Error {
    let megabytes = bytes.div_ceil(1_000_000);
    error.hint(format!(
        "make room for {megabytes} MB on the device, or give another folder with --to (`adb shell df` shows free \
         space); what has arrived is not copied again"
    ))
}

/// Runs a command, once more if the phone disconnects meanwhile.
pub(super) fn once_more<T>(
    device: &Device,
    mut command: impl FnMut() -> Result<T, Fault>,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) -> Result<T> {
    match command() {
        Err(Fault::Gone(error)) if error.kind() != ErrorKind::Cancelled => {
            on_event(PushEvent::Lost(&error));
            device.wait()?;
            on_event(PushEvent::Back);
            Ok(command()?)
        }
        result => Ok(result?),
    }
}
