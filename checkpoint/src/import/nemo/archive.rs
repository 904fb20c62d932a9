//! The archive: a tar whose entries are read where they lie.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::Range;

use qhx_base::artifacts::Mapped;

use super::Read;

/// Entries that an archive may have; published ones have some dozens.
const MAX_ENTRIES: usize = 1 << 12;
/// The first bytes of a file of gzip.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Names of the files of an archive, and where their bytes are.
#[derive(Debug)]
pub(super) struct Archive {
    map: Mapped,
    files: BTreeMap<String, Range<usize>>,
}

impl Archive {
    /// Reads the headers.
    pub(super) fn open(map: &Mapped) -> Read<Self> {
        let bytes = map.bytes();
        if bytes.starts_with(&GZIP) {
            return Err(
                "compressed by gzip, expected a plain tar: unpack it with `gzip -dc`".to_owned()
            );
        }
        let damaged = |e: std::io::Error| format!("no whole tar archive: {e}");
        let mut files = BTreeMap::new();
        let mut tar = tar::Archive::new(Cursor::new(bytes));
        for entry in tar.entries_with_seek().map_err(damaged)? {
            let entry = entry.map_err(damaged)?;
            if entry.header().entry_type() != tar::EntryType::Regular {
                continue;
            }
            if files.len() == MAX_ENTRIES {
                return Err(format!("more than {MAX_ENTRIES} files"));
            }
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let name = name.trim_start_matches("./").to_owned();
            let place = |number: u64| usize::try_from(number).ok();
            let start = place(entry.raw_file_position());
            let range = start
                .and_then(|start| Some(start..start.checked_add(place(entry.size())?)?))
                .filter(|range| range.end <= bytes.len())
                .ok_or_else(|| format!("{name} lies beyond the end of the file"))?;
            files.insert(name, range);
        }
        Ok(Self { map: map.clone(), files })
    }

    /// Place of the file `name`.
    pub(super) fn place(&self, name: &str) -> Read<Range<usize>> {
        self.files.get(name).cloned().ok_or_else(|| {
            let found: Vec<_> = self.files.keys().take(4).map(String::as_str).collect();
            format!("no {name} among its {} files (such as {})", self.files.len(), found.join(", "))
        })
    }

    /// Contents of the file `name`, of at most `most` bytes.
    pub(super) fn bytes(&self, name: &str, most: usize) -> Read<&[u8]> {
        let range = self.place(name)?;
        if range.len() > most {
            return Err(format!("{name} has {} bytes, expected at most {most}", range.len()));
        }
        Ok(self.map.bytes().get(range).unwrap_or_default())
    }

    /// The whole file.
    pub(super) fn map(&self) -> &Mapped {
        &self.map
    }
}
