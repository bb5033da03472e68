#!/bin/sh
uname -s > /workspace/kernel.txt
