//! Installing plugins, and what is refused before any of their code runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use qhx_base::{CancelToken, ErrorKind};
use qhx_core::op::OpProvider;
use qhx_plugins::lock::{LOCK_FILE, Lock};
use qhx_plugins::store::{PluginHealth, Store};
use qhx_plugins::{
    Listed, LoadErrorKind, Plugin, PluginOptions, PluginStatus, Plugins, Prober, Status, survey,
};
use qhx_tests::{has, null_model, outside, plugin_files, says};
use serde_json::json;

fn misbehaving() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| plugin_files::build("qhx-test-misbehaving-plugin"))
}

fn prober() -> Prober {
    Prober::new(qhx_paths::program("probe"), [] as [&str; 0])
}

/// A folder of the user's own with one installed plugin.
fn installed() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("plugins"));
    store.install(misbehaving(), Some(&prober())).unwrap();
    (folder, store)
}

fn dir(store: &Store) -> PluginOptions {
    PluginOptions::default().dirs(vec![store.dir().to_owned()]).only_named(true)
}

fn file(store: &Store) -> PathBuf {
    store.dir().join(misbehaving().file_name().unwrap())
}

fn only_row(options: &PluginOptions) -> Listed {
    let mut rows = survey(options).unwrap();
    assert_eq!(rows.len(), 1, "{rows:#?}");
    rows.remove(0)
}

/// Changes one byte of a file without changing its length or its time of modification.
fn flip_a_byte(path: &Path) {
    let time = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn an_installed_plugin_is_listed_without_loading_and_runs() {
    let (_folder, store) = installed();
    let lock = Lock::read(store.dir()).unwrap().unwrap();
    assert_eq!(lock.plugins[0].interface, qhx_plugins::interface_version());

    let row = only_row(&dir(&store));
    assert_eq!(row.status, Status::Ok);
    assert!(row.ops.iter().any(|op| op == "test_nan_logits"), "{row:?}");

    let plugins = Plugins::discover(&dir(&store)).unwrap();
    assert!(matches!(plugins.files(), [PluginStatus::Installed { .. }]), "{plugins:?}");
    null_model::open("test_nan_logits", &plugins, &CancelToken::new()).unwrap();
    assert!(store.verify().unwrap().iter().all(|v| v.health == PluginHealth::Ok));
}

#[test]
fn an_installed_plugin_that_failed_to_load_once_is_tried_again() {
    let (_folder, store) = installed();
    let plugins = Plugins::discover(&dir(&store)).unwrap();
    let open = || null_model::open("test_nan_logits", &plugins, &CancelToken::new());
    let away = store.dir().join("away");
    fs::rename(file(&store), &away).unwrap();
    has(open().unwrap_err().message(), &["cannot be read"]);
    fs::rename(&away, file(&store)).unwrap();
    open().unwrap();
}

/// Fifty installed plugins, each of which ends the process that loads it.
#[cfg(target_os = "linux")]
#[test]
fn listing_installed_plugins_loads_none_of_them() {
    use std::os::unix::fs::MetadataExt as _;
    const COUNT: usize = 50;
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("first");
    let crashing = plugin_files::build_example("qhx-test-malformed-plugins", "crash_on_load");
    fs::copy(crashing, &first).unwrap();
    let (hash, data) =
        (&outside::hashes(std::slice::from_ref(&first))[0].1, fs::metadata(&first).unwrap());
    let modified = data.mtime() * 1_000_000_000 + data.mtime_nsec();
    let plugins = (0..COUNT).map(|index| {
        let file = plugin_files::library_name(&format!("crash_{index}"));
        fs::hard_link(&first, folder.path().join(&file)).unwrap();
        let op = json!({"name": format!("test_crash_{index}"), "tasks": ["generate"]});
        json!({"file": file, "sha256": hash, "bytes": data.len(), "modified_ns": modified,
            "interface": qhx_plugins::interface_version(), "ops": [op]})
    });
    let lock = json!({"version": 1, "plugins": plugins.collect::<Vec<_>>()});
    fs::remove_file(&first).unwrap();
    fs::write(folder.path().join(LOCK_FILE), lock.to_string()).unwrap();

    let options = PluginOptions::default().dirs(vec![folder.path().to_owned()]).only_named(true);
    let rows = survey(&options).unwrap();
    assert!(rows.len() == COUNT && rows.iter().all(|row| row.status == Status::Ok), "{rows:#?}");
    // Opening a bundle asks who has an op; only the one that has it would be loaded.
    let plugins = Plugins::discover(&options).unwrap();
    assert!(plugins.find("no_such_op").is_err());
    assert_eq!(
        plugins.list().iter().filter(|op| op.description.name.contains("crash")).count(),
        COUNT
    );
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libcrash_"), "a plugin is mapped");
}

#[test]
fn a_flipped_byte_is_noticed_when_loading_and_verifying() {
    let (_folder, store) = installed();
    flip_a_byte(&file(&store));
    let plugins = Plugins::discover(&dir(&store)).unwrap();
    let error = plugins.find("test_nan_logits").unwrap_err();
    says(
        &error,
        ErrorKind::Plugin,
        &["test_nan_logits", "changed since it was installed", "sha256", "install"],
    );
    assert_eq!(store.verify().unwrap()[0].health, PluginHealth::Changed);

    // Named outright, it is refused as well: the lock beside it knows better.
    let options = PluginOptions::default().files(vec![file(&store)]);
    assert!(
        Plugins::discover(&options).unwrap_err().report().to_string().contains("changed since")
    );
}

#[test]
fn changed_missing_and_foreign_files_are_told_apart_in_the_list() {
    let (_folder, store) = installed();
    let stranger = store.dir().join(plugin_files::library_name("stranger"));
    fs::copy(misbehaving(), &stranger).unwrap();
    let rows = survey(&dir(&store)).unwrap();
    let status = |path: &Path| rows.iter().find(|row| row.path == path).map(|row| row.status);
    assert_eq!(status(&stranger), Some(Status::NotInstalled));
    assert_eq!(status(&file(&store)), Some(Status::Ok));
    let plugins = Plugins::discover(&dir(&store)).unwrap();
    let unusable = plugins.files().iter().any(
        |status| matches!(status, PluginStatus::Failed(e) if e.kind == LoadErrorKind::NotInstalled),
    );
    assert!(unusable, "{plugins:?}");
    fs::remove_file(stranger).unwrap();

    fs::write(file(&store), "something shorter").unwrap();
    assert_eq!(only_row(&dir(&store)).status, Status::Changed);
    fs::remove_file(file(&store)).unwrap();
    assert_eq!(only_row(&dir(&store)).status, Status::Missing);

    store.install(misbehaving(), None).unwrap();
    let lock = store.dir().join(LOCK_FILE);
    let interface = format!("\"interface\": \"{}\"", qhx_plugins::interface_version());
    let text = fs::read_to_string(&lock).unwrap();
    assert!(text.contains(&interface));
    fs::write(&lock, text.replace(&interface, "\"interface\": \"9.1.0\"")).unwrap();
    let row = only_row(&dir(&store));
    assert_eq!(row.status, Status::Incompatible);
    assert!(row.reason.is_some_and(|why| why.contains("9.1.0") && why.contains("rebuild")));
}

#[test]
fn the_second_plugin_with_the_same_ops_is_shadowed() {
    let (_folder, store) = installed();
    let copy = store.dir().join("elsewhere");
    fs::create_dir(&copy).unwrap();
    let copy = copy.join(plugin_files::library_name("zz_copy"));
    fs::copy(misbehaving(), &copy).unwrap();
    let done = store.install(&copy, None).unwrap();
    assert!(done.conflicts.iter().any(|(op, _)| op == "test_nan_logits"), "{done:?}");
    let statuses: Vec<_> = survey(&dir(&store)).unwrap().iter().map(|row| row.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Shadowed]);
}

#[test]
fn removing_takes_the_file_and_its_entry() {
    let (_folder, store) = installed();
    let error = store.remove("no_such_plugin").unwrap_err().report().to_string();
    assert!(error.contains("no_such_plugin") && error.contains("misbehaving"), "{error}");
    store.remove("test_endless_loop").unwrap();
    assert!(!file(&store).exists());
    assert!(store.plugins().unwrap().is_empty());
    assert!(Plugins::discover(&dir(&store)).unwrap().find("test_endless_loop").is_err());
}

#[test]
fn copies_of_an_installation_that_was_stopped_are_removed() {
    let (_folder, store) = installed();
    let left = store.dir().join(format!(".installing-x7Gq2{}", std::env::consts::DLL_SUFFIX));
    fs::write(&left, "half a library").unwrap();
    let own = store.dir().join("installing-notes.txt");
    fs::write(&own, "mine").unwrap();
    store.install(misbehaving(), None).unwrap();
    assert!(!left.exists());
    assert!(own.exists(), "a file of another name stays");
}

#[test]
fn what_is_no_plugin_is_not_installed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("plugins"));
    let text = folder.path().join(plugin_files::library_name("text"));
    fs::write(&text, "no library").unwrap();
    let error = store.install(&text, Some(&prober())).unwrap_err().report().to_string();
    assert!(error.contains("not installed") && error.contains("text"), "{error}");
    let error =
        store.install(&folder.path().join("notes.txt"), None).unwrap_err().report().to_string();
    assert!(error.contains("cargo build"), "{error}");
    assert!(store.plugins().unwrap().is_empty());
    let left: Vec<_> = fs::read_dir(store.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().contains("guard")), "{left:?}");
}

/// Nobody writes into it, so that whoever opened it would wait for ever.
#[cfg(unix)]
#[test]
fn a_fifo_named_like_a_plugin_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join(plugin_files::library_name("qhx_ops_fifo"));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let dirs = vec![folder.path().to_owned()];
    let prober = Some(prober());
    let options = PluginOptions::default().dirs(dirs).only_named(true).prober(prober);
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let found =
            Plugins::discover(&options).unwrap().find("no_such_op").unwrap_err().to_string();
        let listed = only_row(&options).reason.unwrap();
        let loaded = Plugin::load(&fifo).unwrap_err().to_string();
        let store = Store::new(fifo.with_file_name("store"));
        let installed = store.install(&fifo, options.prober.as_ref()).unwrap_err().to_string();
        send.send([found, listed, loaded, installed])
    });
    for message in receive.recv_timeout(Duration::from_secs(60)).expect("nothing waits for it") {
        assert!(message.contains("a FIFO, expected a regular file"), "{message}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_that_others_may_change_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join(plugin_files::library_name("open"));
    fs::copy(misbehaving(), &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o666)).unwrap();
    let error = Plugin::load(&copy).unwrap_err();
    assert_eq!(error.kind, LoadErrorKind::Untrusted);
    let message = error.to_string();
    has(&message, &["mode 666", "chmod go-w", "--allow-untrusted-plugins"]);
    let mut options = PluginOptions::default().files(vec![copy]);
    options.only_named = true;
    assert_eq!(only_row(&options).status, Status::Untrusted);
    assert!(Plugins::discover(&options).unwrap_err().report().to_string().contains("mode 666"));
    options.allow_untrusted = true;
    assert!(Plugins::discover(&options).unwrap().find("test_nan_logits").is_ok());
}

#[test]
fn without_plugins_nothing_is_loaded_not_even_what_is_named() {
    let options = PluginOptions::default().files(vec![misbehaving().to_owned()]).no_plugins(true);
    let plugins = Plugins::discover(&options).unwrap();
    assert!(plugins.files().is_empty());
    has(&plugins.find("test_nan_logits").unwrap_err().report().to_string(), &["--no-plugins"]);
    assert!(survey(&options).unwrap().is_empty());
}

/// A file that was installed, replaced between hashing and opening, would be another file. The
/// loader gets the open file itself, so there is no between; what shows is that a loaded file that
/// is replaced afterwards is noticed.
#[cfg(target_os = "linux")]
#[test]
fn the_library_in_memory_is_the_hashed_file_not_the_path() {
    let (_folder, store) = installed();
    let plugins = Plugins::discover(&dir(&store)).unwrap();
    plugins.find("test_nan_logits").unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = file(&store).canonicalize().unwrap();
    assert!(maps.contains(path.to_str().unwrap()), "the installed file is not mapped");

    // Written in place, the mapped library would run on changed bytes: refused from now on. The
    // test changes the time alone, for this process ends with the library mapped.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    let again = Plugins::discover(&dir(&store)).unwrap();
    let error = again.find("test_nan_logits").unwrap_err().report().to_string();
    assert!(error.contains("changed since this program loaded it"), "{error}");
}

mod crashing {
    use super::*;

    fn odd(name: &str) -> PathBuf {
        plugin_files::build_example("qhx-test-malformed-plugins", name)
    }

    fn named(file: PathBuf, prober: Prober) -> PluginOptions {
        PluginOptions::default().files(vec![file]).only_named(true).prober(Some(prober))
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_plugin_that_crashes_while_loading_is_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("tried.json");
        let file = odd("crash_on_load");
        let prober = prober().remembering(Some(memory.clone()));
        let options = named(file.clone(), prober.clone());
        assert_eq!(only_row(&options).status, Status::Untried);
        let message = Plugins::discover(&options).unwrap_err().report().to_string();
        assert!(message.contains("crash_on_load") && message.contains("signal 6"), "{message}");
        assert_eq!(only_row(&options).status, Status::Crashed);

        // Remembered: a prober that cannot be started is not needed any more.
        let absent = Prober::new("/no/such/program", [] as [&str; 0]).remembering(Some(memory));
        let message =
            Plugins::discover(&named(file.clone(), absent)).unwrap_err().report().to_string();
        assert!(message.contains("signal 6"), "{message}");

        // Found in a folder it is passed over, and the others work.
        let good = folder.path().join("plugins");
        fs::create_dir(&good).unwrap();
        fs::copy(&file, good.join(plugin_files::library_name("a_crash"))).unwrap();
        fs::copy(misbehaving(), good.join(plugin_files::library_name("b_good"))).unwrap();
        let options =
            PluginOptions::default().dirs(vec![good]).only_named(true).prober(Some(prober));
        assert!(Plugins::discover(&options).unwrap().find("test_nan_logits").is_ok());

        let store = Store::new(folder.path().join("store"));
        let message =
            store.install(&file, options.prober.as_ref()).unwrap_err().report().to_string();
        assert!(message.contains("not installed") && message.contains("signal 6"), "{message}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_plugin_that_hangs_while_loading_is_given_up() {
        let mut prober = prober();
        prober.patience = Duration::from_millis(500);
        let message = Plugins::discover(&named(odd("hang_on_load"), prober))
            .unwrap_err()
            .report()
            .to_string();
        assert!(message.contains("had not ended after 0.5 s"), "{message}");
    }
}
