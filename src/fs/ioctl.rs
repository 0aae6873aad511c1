//! ioctl(2) on control files, and ID on any other: taken apart here, answered by the store.

use std::sync::Arc;

use fuser::{Errno as FuseErrno, ReplyIoctl};
use nix::errno::Errno;

use super::adapter::{Open, fuse_errno};
use crate::abi::{self, Command, Request};
use crate::store::Store;

/// Answers a command on an open file; directories have no handle of ours.
pub(super) fn answer(store: &Arc<Store>, open: Option<Open>, number: u32, data: &[u8], reply: ReplyIoctl) {
    let command = abi::command(number);
    let request = || abi::decode(number, data);
    match open {
        Some(Open::File(handle)) if command == Some(Command::Id) => {
            let said = request().and_then(|request| match request {
                Request::Id(id) => store.identify(&handle, id),
                _ => Err(Errno::ENOTTY),
            });
            give(reply, said);
        }
        Some(Open::Control(opened)) if command.is_some_and(|command| command != Command::Id) => {
            let Some(session) = opened.session else { return reply.error(FuseErrno::ENOTTY) };
            match request() {
                // It is told what would be understood, too.
                Ok(Request::Hello(hello)) if hello.header.version != abi::VERSION => {
                    reply.ioctl(-(Errno::EPROTO as i32), &store.hello());
                }
                Ok(request) => store.control(session, request, Box::new(move |said| give(reply, said))),
                Err(errno) => reply.error(fuse_errno(errno)),
            }
        }
        // Many programs ask each file that they open whether it is a terminal.
        _ => reply.error(FuseErrno::ENOTTY),
    }
}

fn give(reply: ReplyIoctl, said: Result<Vec<u8>, Errno>) {
    match said {
        Ok(bytes) => reply.ioctl(0, &bytes),
        Err(errno) => reply.error(fuse_errno(errno)),
    }
}
