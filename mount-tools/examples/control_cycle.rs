//! One request of an inference engine against a kvcachefs mount, from lookup to release.
//!
//! `cargo run -p mount-tools --example control_cycle /mnt/kv qwen3-8b/rank0/3fa9.kv`
//!
//! The first process is the scheduler. It starts itself again as the rank that reads: in an engine that is a worker process of
//! its own, which has been told the number of the lease.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use mount_tools::client::{Became, Handle, Range, Terms, Wish, id};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [flag, number, mount, names @ ..] if flag == "--rank" => rank(number.parse()?, mount, names),
        [mount, names @ ..] if !names.is_empty() => scheduler(mount, names),
        _ => Err("usage: control_cycle MOUNT NAME... (from the root of the mount)".into()),
    }
}

fn scheduler(mount: &str, names: &[String]) -> Result<(), Box<dyn Error>> {
    // One handle for the life of the engine. What is asked for by it goes when the process dies.
    let handle = Handle::open(mount)?;
    let window: Vec<Range> = handle.intern(names)?.into_iter().map(Range::of).collect();
    let found = handle.lookup(&window)?;
    println!("lookup {} of {}", found.prefix, window.len());
    if found.prefix < window.len() {
        return Err("a range is missing, and is computed instead".into());
    }
    // One share for the rank, one that the scheduler keeps.
    let wish = Wish::new().leased(Terms::shared_by(2)).deadline(Duration::from_secs(30)).tag(42);
    let lease = match handle.prefetch(&window, &wish)?.became {
        Became::Here(lease) => lease,
        Became::Begun(ticket) => {
            // An engine goes on with other requests: it polls the handle, or calls `ends`, and finds the request by the tag.
            println!("waiting");
            ticket.wait(None)?.and_then(|end| end.lease)
        }
        Became::Denied(why) => return Err(format!("denied, and computed instead: {why}").into()),
        Became::Nothing => None,
    };
    let lease = lease.ok_or("it was not brought")?;
    println!("acquired");
    let mut rank = Command::new(std::env::current_exe()?);
    let status = rank.args(["--rank", &lease.number().to_string(), mount]).args(names).status()?;
    lease.release()?;
    println!("released");
    if status.success() { Ok(()) } else { Err("the rank failed".into()) }
}

fn rank(number: u64, mount: &str, names: &[String]) -> Result<(), Box<dyn Error>> {
    let handle = Handle::open(mount)?;
    let lease = handle.attach(number)?;
    let (_, held) = lease.query()?;
    let mut bytes = 0;
    for (at, (name, held)) in (0..).zip(names.iter().zip(held)) {
        let mut file = File::open(Path::new(mount).join(name))?;
        // A name may lead to other bytes by now; the lease holds a version.
        if id(&file)?.node != held.node {
            return Err(format!("{name}: replaced since it was leased").into());
        }
        bytes += file.read_to_end(&mut Vec::new())?;
        // What has been read is free for others; the last part gives the share back.
        lease.release_parts(&[Range::item(at)])?;
    }
    println!("rank read {bytes} bytes");
    Ok(())
}
