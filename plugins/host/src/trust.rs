//! Checks who may have written a plugin, and pins the exact file that is loaded.
//!
//! A plugin has all rights of the process. So only the user or the administrator may be able to
//! change a plugin file or the folder it lies in, and what is loaded is the very file that was
//! checked and hashed: it is opened once, and the system loader gets that open file.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use qhx_base::files::{self, FileIdentity};
use qhx_base::hash::sha256;
use qhx_base::{Error, ErrorKind};

/// An open plugin file.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) file: File,
    /// Absolute, without links; on Windows without the prefix `\\?\` wherever the path works without it.
    pub(crate) path: PathBuf,
    pub(crate) identity: FileIdentity,
}

/// True for the same file, whatever its state. Never where files have no numbers.
pub(crate) fn same_file(a: &FileIdentity, b: &FileIdentity) -> bool {
    a.inode != 0 && (a.device, a.inode) == (b.device, b.inode)
}

impl Pinned {
    /// Opens a regular file without waiting for anybody. Errors say why not, without the path.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let path = dunce::canonicalize(path).map_err(|e| files::why(&e))?;
        let file = files::open(ErrorKind::Plugin, &path).map_err(|e| unnamed(&e, &path))?;
        let identity = FileIdentity::of(&file.metadata().map_err(|e| e.to_string())?);
        Ok(Self { file, path, identity })
    }

    /// SHA-256 of the content, as hexadecimal digits. Errors say why not, without the path.
    pub(crate) fn sha256(&self) -> Result<String, String> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).map_err(|e| files::why(&e))?;
        sha256(ErrorKind::Plugin, &self.path, file, |_| Ok(())).map_err(|e| unnamed(&e, &self.path))
    }

    /// The path that makes the system loader open this very file: through the process's table of
    /// open files on Linux. The file must stay open as long as the library is loaded, because the
    /// loader remembers libraries by the path they were loaded from.
    pub(crate) fn load_path(&self) -> PathBuf {
        #[cfg(target_os = "linux")]
        {
            use std::os::fd::AsRawFd;
            let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
            if path.exists() {
                return path;
            }
        }
        self.path.clone()
    }

    /// True while the path still leads to this file. Where the loader opens the path by itself,
    /// this is asked after loading.
    pub(crate) fn still_there(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|data| FileIdentity::of(&data) == self.identity)
    }
}

/// The message of an error without the path that it begins with.
fn unnamed(error: &Error, path: &Path) -> String {
    let named = format!("{}: ", path.display());
    error.message().strip_prefix(&named).unwrap_or(error.message()).to_owned()
}

/// Checks that only the user or the administrator can change the file, its folder and the folder
/// that it was found in.
#[cfg(unix)]
pub(crate) fn check(pinned: &Pinned, found_in: Option<&Path>) -> Result<(), String> {
    let data = pinned.file.metadata().map_err(|e| e.to_string())?;
    check_one(&pinned.path, &data)?;
    let real = pinned.path.parent();
    let found_in = found_in.and_then(|dir| dunce::canonicalize(dir).ok());
    for dir in real.into_iter().chain(found_in.as_deref().filter(|dir| Some(*dir) != real)) {
        check_dir(dir)?;
    }
    Ok(())
}

/// Same as [`check`], for a folder alone.
#[cfg(unix)]
pub(crate) fn check_dir(dir: &Path) -> Result<(), String> {
    let data = std::fs::metadata(dir).map_err(|e| format!("its folder {}: {e}", dir.display()))?;
    check_one(dir, &data)
}

/// Access rights are not looked at on this system.
#[cfg(not(unix))]
pub(crate) fn check(_pinned: &Pinned, _found_in: Option<&Path>) -> Result<(), String> {
    Ok(())
}

/// Access rights are not looked at on this system.
#[cfg(not(unix))]
pub(crate) fn check_dir(_dir: &Path) -> Result<(), String> {
    Ok(())
}

#[cfg(unix)]
fn check_one(path: &Path, data: &std::fs::Metadata) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    const GROUP_WRITES: u32 = 0o020;
    const OTHERS_WRITE: u32 = 0o002;
    let me = nix::unistd::geteuid().as_raw();
    let (owner, mode) = (data.uid(), data.mode() & 0o7777);
    let why = if owner != me && owner != 0 {
        format!("belongs to user {owner}, expected user {me} (who runs this program) or root")
    } else if mode & OTHERS_WRITE != 0 {
        format!("may be changed by every user (mode {mode:o})")
    } else if mode & GROUP_WRITES != 0 && !is_private_group(owner, data.gid()) {
        format!("may be changed by group {} (mode {mode:o})", data.gid())
    } else {
        return Ok(());
    };
    Err(format!("{} {why}", path.display()))
}

/// True for the group that many systems give each user, with the user's name and nobody else in
/// it: there a file that the group may write is the ordinary case and nobody else's.
#[cfg(unix)]
fn is_private_group(user: u32, group: u32) -> bool {
    use nix::unistd::{Gid, Group, Uid, User};
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(user)) else { return false };
    let Ok(Some(group)) = Group::from_gid(Gid::from_raw(group)) else { return false };
    user.gid == group.gid
        && group.name == user.name
        && group.mem.iter().all(|member| *member == user.name)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn set(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn found(path: &Path) -> Result<(), String> {
        check(&Pinned::open(path).unwrap(), None)
    }

    #[test]
    fn a_file_or_folder_that_everyone_may_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libx.so");
        std::fs::write(&file, "x").unwrap();
        set(&file, 0o644);
        found(&file).unwrap();

        set(&file, 0o646);
        let why = found(&file).unwrap_err();
        assert!(why.contains("libx.so may be changed by every user (mode 646)"), "{why}");

        set(&file, 0o644);
        set(folder.path(), 0o777);
        let why = found(&file).unwrap_err();
        assert!(why.contains("every user (mode 777)") && !why.contains("libx.so"), "{why}");
        set(folder.path(), 0o700);
    }

    #[test]
    fn a_link_is_judged_by_both_folders() {
        let (open, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = own.path().join("libx.so");
        std::fs::write(&file, "x").unwrap();
        set(&file, 0o644);
        let link = open.path().join("libx.so");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        set(open.path(), 0o777);
        let pinned = Pinned::open(&link).unwrap();
        check(&pinned, None).unwrap();
        assert!(check(&pinned, Some(open.path())).unwrap_err().contains("mode 777"));
    }

    #[test]
    fn a_file_of_somebody_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libx.so");
        std::fs::write(&file, "x").unwrap();
        // Only root can give files away; elsewhere there is nothing to test with.
        if std::os::unix::fs::chown(&file, Some(12345), None).is_ok() {
            let why = found(&file).unwrap_err();
            assert!(why.contains("belongs to user 12345"), "{why}");
        }
        set(&file, 0o664);
        if std::os::unix::fs::chown(&file, Some(0), Some(12345)).is_ok() {
            let why = found(&file).unwrap_err();
            assert!(why.contains("may be changed by group 12345 (mode 664)"), "{why}");
        }
    }

    #[test]
    fn what_is_hashed_is_the_open_file_not_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libx.so");
        std::fs::write(&file, "first").unwrap();
        let pinned = Pinned::open(&file).unwrap();
        let before = pinned.sha256().unwrap();
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "other").unwrap();
        assert_eq!(pinned.sha256().unwrap(), before);
        assert!(!pinned.still_there());
        #[cfg(target_os = "linux")]
        assert_eq!(std::fs::read(pinned.load_path()).unwrap(), b"first");
    }
}
