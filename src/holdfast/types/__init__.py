"""The data types of the system as frozen Structs; pure, import no other part of holdfast, on every platform.

The same Structs go over the wire: camelCase, bytes as base64 in JSON and raw in MessagePack. One module for each
noun; import the names from here.
"""

from holdfast.types.base import *
from holdfast.types.confinement import *
from holdfast.types.files import *
from holdfast.types.output import *
from holdfast.types.process import *
from holdfast.types.server import *
from holdfast.types.shell import *
from holdfast.types.terminal import *
from holdfast.types.usage import *
